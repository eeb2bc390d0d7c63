set -e
cd /tmp/w39
git reset -q --hard d5cfd282 && git clean -qfd -e .venv smelt compress export evaluate tests
cp /tmp/tools/pyproject39.toml pyproject.toml
git mv -f smelt/cli_main.py smelt/cli_main.py 2>/dev/null || true
[ -f smelt/cli.py ] && mv smelt/cli.py smelt/cli_main.py
cat /tmp/tools/spec.txt /tmp/tools/spec2.txt > /tmp/tools/all.txt; echo "cli.main = cli_main" >> /tmp/tools/all.txt
SMELT_DIR=smelt MAPPED="compress export evaluate configs" python3 /tmp/tools/merge.py /tmp/tools/all.txt > /tmp/tools/merge.log 2>&1
grep -v "lines from" /tmp/tools/merge.log
grep -rlP "smelt\.cli(?!\.\w)" smelt tests benchmarks tools pyproject.toml README.md docs | xargs sed -i -E "s/smelt\.cli( import|:|\"|$)/smelt.cli.main\1/g"
for i in 1 2 3; do .venv/bin/ruff check --fix -q --select I,F811,F401,D202 . >/dev/null || true; done
.venv/bin/ruff format -q . || true
