"""merge.py SPEC: each line `target = a b c` (modules without `smelt.`); order by dependency. `target = a` moves.
Options per line after '|': `a._x>_y` renames a top-level name of source a before merging."""
import ast, io, os, re, subprocess, sys, tokenize, collections

TOPS = {"core", "families", "runtime", "compress", "export", "evaluate", "configs"}
SMELT_DIR = os.environ.get("SMELT_DIR", "pipeline")  # folder of smelt itself
MAPPED = set(os.environ.get("MAPPED", " ".join(TOPS)).split())

def path_of(mod):  # mod without smelt.
    parts = mod.split(".")
    base = parts if parts[0] in MAPPED else [SMELT_DIR] + parts
    return "/".join(base) + ".py"

def run(c): return subprocess.check_output(c, shell=True, text=True)
def files(*ext):
    out = run("git ls-files -co --exclude-standard").split("\n")
    return [f for f in out if f.endswith(ext) and os.path.exists(f)]

def toplevel(tree):
    names = []
    for n in tree.body:
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)): names.append(n.name)
        elif isinstance(n, ast.Assign):
            for t in n.targets:
                for x in ast.walk(t):
                    if isinstance(x, ast.Name): names.append(x.id)
        elif isinstance(n, (ast.AnnAssign, ast.AugAssign)) and isinstance(n.target, ast.Name): names.append(n.target.id)
        elif isinstance(n, (ast.If, ast.Try)):
            for x in ast.walk(n):
                if isinstance(x, ast.Assign):
                    for t in x.targets:
                        if isinstance(t, ast.Name): names.append(t.id)
    return list(dict.fromkeys(names))

def rename_tokens(src, table, attrs=False):
    """Rename NAME tokens that are no attribute and no keyword argument."""
    toks = list(tokenize.generate_tokens(io.StringIO(src).readline))
    lines = src.splitlines(keepends=True)
    edits = []
    depth = 0
    for i, t in enumerate(toks):
        if t.type == tokenize.OP and t.string in "([{": depth += 1
        elif t.type == tokenize.OP and t.string in ")]}": depth -= 1
        if t.type == tokenize.NAME and t.string in table:
            prev = toks[i-1] if i else None
            nxt = toks[i+1]
            if prev is not None and prev.string == ".": continue
            if depth and nxt.string == "=" : continue
            edits.append((t.start, t.end, table[t.string]))
    for (r, c), (r2, c2), new in reversed(edits):
        l = lines[r-1]; lines[r-1] = l[:c] + new + l[c2:]
    out = "".join(lines)
    # names inside f-strings (3.11: f-strings are one token)
    def fix(m):
        s = m.group(0)
        return s
    for old, new in table.items():
        out = re.sub(r'(\{[^{}"\']*?)(?<![\w.])' + re.escape(old) + r'(?!\w)(?=[^{}]*\})', lambda m: m.group(1) + new, out) if 0 else out
    # f-strings: handle through token strings
    res = []; last = 0
    toks = list(tokenize.generate_tokens(io.StringIO(out).readline))
    lines = out.splitlines(keepends=True); starts = [0]
    for l in lines: starts.append(starts[-1] + len(l))
    for t in toks:
        if t.type == tokenize.STRING and re.match(r'[rR]?[fF]', t.string):
            s = t.string; new_s = s
            for old, new in table.items():
                new_s = re.sub(r'(?<=\{)([^{}]*)', lambda m: re.sub(r'(?<![\w."\'])' + re.escape(old) + r'(?![\w"\'])', new, m.group(1)), new_s)
            if new_s != s:
                a = starts[t.start[0]-1] + t.start[1]; b = starts[t.end[0]-1] + t.end[1]
                res.append((a, b, new_s))
    for a, b, n in reversed(res): out = out[:a] + n + out[b:]
    return out

def segment(lines, n):
    start = min([n.lineno] + [d.lineno for d in getattr(n, "decorator_list", [])])
    return start, n.end_lineno

class Mod:
    def __init__(self, name, src):
        self.name = name; self.src = src; self.tree = ast.parse(src)
        self.names = toplevel(self.tree)

def split_header(src):
    """(docstring text or None, imports [(node, text)], type_checking imports [text], rest text)"""
    tree = ast.parse(src); lines = src.splitlines(keepends=True)
    doc = ast.get_docstring(tree, clean=False)
    drop = set(); imports = []; tc = []
    for i, n in enumerate(tree.body):
        if i == 0 and doc is not None:
            drop.update(range(n.lineno, n.end_lineno + 1)); continue
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            imports.append("".join(lines[n.lineno-1:n.end_lineno])); drop.update(range(n.lineno, n.end_lineno + 1))
        elif isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING" and not n.orelse and all(isinstance(x, (ast.Import, ast.ImportFrom)) for x in n.body):
            for x in n.body: tc.append(ast.unparse(x))
            drop.update(range(n.lineno, n.end_lineno + 1))
    rest = "".join(l for i, l in enumerate(lines, 1) if i not in drop).strip("\n") + "\n"
    return doc, imports, tc, rest

def topo(mods, deps):
    order = []; seen = set()
    def visit(m, stack=()):
        if m in seen: return
        if m in stack: return
        for d in mods:
            if d in deps[m] and d != m: visit(d, stack + (m,))
        seen.add(m); order.append(m)
    for m in mods: visit(m)
    return order

def drop_inner_imports(src, merged, target, names_of):
    """Remove imports (at any depth) of names from merged modules; returns src and aliases/module uses to rename."""
    tree = ast.parse(src); lines = src.splitlines(keepends=True)
    edits = []; rename = {}; modnames = {}
    parents = {}
    for p in ast.walk(tree):
        for c in ast.iter_child_nodes(p): parents[c] = p
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module:
            full = n.module
            if full.startswith("smelt.") and full[6:] in merged:
                for a in n.names:
                    if a.asname and a.asname != a.name: rename[a.asname] = a.name
                edits.append((n.lineno, n.end_lineno, None, n.col_offset, n))
            elif full.startswith("smelt"):
                keep = []
                hit = False
                for a in n.names:
                    sub = (full[6:] + "." if full != "smelt" else "") + a.name
                    if sub in merged:
                        hit = True; modnames[a.asname or a.name] = sub
                    else: keep.append(a)
                if hit:
                    new = f"from {full} import " + ", ".join(a.name + (f" as {a.asname}" if a.asname else "") for a in keep) if keep else None
                    edits.append((n.lineno, n.end_lineno, new, n.col_offset, n))
    for a, b, new, col, node in sorted(edits, key=lambda e: e[:2], reverse=True):
        par = parents[node]
        text = (" " * col + new + "\n") if new else ""
        if not text and isinstance(par, (ast.FunctionDef, ast.If, ast.With, ast.Try)) and len(getattr(par, "body", [])) == 1 and par.body[0] is node:
            if isinstance(par, ast.If) and ast.unparse(par.test) == "TYPE_CHECKING":
                # drop the if too
                lines[par.lineno-1:par.end_lineno] = [""] * (par.end_lineno - par.lineno + 1); continue
            text = " " * col + "pass\n"
        lines[a-1:b] = [text] + [""] * (b - a)
    src = "".join(lines)
    if rename: src = rename_tokens(src, rename)
    for local, sub in modnames.items():
        src = re.sub(r"(?<![\w.\"'])" + re.escape(local) + r"\.(?=[A-Za-z_])", "", src)
    return src

def merge(target, sources, renames, report):
    texts = {}
    for s in sources:
        src = open(path_of(s)).read()
        if s in renames:
            src = rename_tokens(src, renames[s])
        texts[s] = src
    merged = set(sources)
    deps = {}
    for s in sources:
        tree = ast.parse(texts[s]); d = set()
        for n in tree.body:
            if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("smelt"):
                if n.module[6:] in merged: d.add(n.module[6:])
                for a in n.names:
                    sub = (n.module[6:] + "." if n.module != "smelt" else "") + a.name
                    if sub in merged: d.add(sub)
        deps[s] = d
    order = topo(sources, deps)
    taken = {}
    pieces = []; imports = ["from __future__ import annotations\n"]; tcs = []; docs = []
    for s in order:
        src = drop_inner_imports(texts[s], merged, target, None)
        tree = ast.parse(src); names = toplevel(tree); lines = src.splitlines(keepends=True)
        # collisions
        table = {}
        dropnodes = []
        for nm in names:
            if nm in taken:
                other, otext = taken[nm]
                mine = [n for n in tree.body if nm in toplevel(ast.Module([n], []))]
                mtext = "\n".join(ast.unparse(n) for n in mine)
                if mtext == otext and len(mine) == 1:
                    dropnodes.append(mine[0])
                else:
                    stem = s.split(".")[-1]
                    new = f"_{stem}{nm}" if nm.startswith("_") else f"{stem}_{nm}"
                    if nm.isupper() or nm.lstrip("_").isupper(): new = new.upper()
                    if nm[0].isupper() and not nm.isupper(): new = "".join(w.title() for w in stem.split("_")) + nm
                    table[nm] = new
                    report.append(f"  collision in {target}: {nm} of {s} (also {other}) -> {new}")
        for n in sorted(dropnodes, key=lambda n: -n.lineno):
            a, b = segment(lines, n); lines[a-1:b] = [""] * (b - a + 1)
        src = "".join(lines)
        if table:
            src = rename_tokens(src, table)
            for nm, new in table.items():
                GLOBAL_RENAMES[s][nm] = new
        for nm in toplevel(ast.parse(src)):
            mine = [n for n in ast.parse(src).body if nm in toplevel(ast.Module([n], []))]
            taken.setdefault(nm, (s, "\n".join(ast.unparse(n) for n in mine)))
        doc, imps, tc, rest = split_header(src)
        docs.append((s, doc)); imports += [i for i in imps if "__future__" not in i]; tcs += tc
        pieces.append(rest)
    main = next((s for s in sources if s == target), sources[0])
    maindoc = dict(docs)[main] or ""
    # others' paragraphs follow
    parts = [maindoc.strip()] + [(d or "").strip() for s, d in docs if s != main and d]
    doc = "\n\n".join(p for p in parts if p)
    uniq = list(dict.fromkeys(imports))
    out = f'"""{doc}\n"""\n\n' if "\n" in doc else f'"""{doc}"""\n\n'
    out += "".join(uniq)
    if tcs:
        runtime = set()
        out += "\nif TYPE_CHECKING:\n" + "".join(f"    {t}\n" for t in dict.fromkeys(tcs))
    out += "\n\n" + "\n\n".join(p.strip("\n") + "\n" for p in pieces if p.strip())
    return out, order

GLOBAL_RENAMES = collections.defaultdict(dict)

def main(spec):
    moves = {}  # old -> target
    jobs = []; report = []
    for line in open(spec):
        line = line.split("#")[0].strip()
        if not line: continue
        body, _, opts = line.partition("|")
        target, _, srcs = body.partition("=")
        target = target.strip(); srcs = srcs.split()
        ren = collections.defaultdict(dict)
        for o in opts.split():
            old, new = o.split(">"); m, _, nm = old.rpartition(".")
            ren[m][nm] = new; GLOBAL_RENAMES[m][nm] = new
        for s in srcs:
            assert os.path.exists(path_of(s)), s
            assert s not in moves, s
            moves[s] = target
        jobs.append((target, srcs, ren))
    outs = {}
    for target, srcs, ren in jobs:
        if len(srcs) == 1:
            t = open(path_of(srcs[0])).read()
            if srcs[0] in ren: t = rename_tokens(t, ren[srcs[0]])
            outs[target] = t
        else:
            outs[target], order = merge(target, srcs, ren, report)
            n = outs[target].count("\n"); report.append(f"{target}: {n} lines from {len(srcs)}")
    for target, srcs, _ in jobs:
        for s in srcs:
            if s != target: os.remove(path_of(s))
        p = path_of(target); os.makedirs(os.path.dirname(p), exist_ok=True); open(p, "w").write(outs[target])
    # rewrite importers
    by_len = sorted(moves, key=len, reverse=True)
    real = {o: t for o, t in moves.items() if o != t}
    changed_names = {m: r for m, r in GLOBAL_RENAMES.items() if r}
    allmods = set(moves)
    for f in files(".py"):
        src = open(f).read()
        if "smelt" not in src: continue
        new = rewrite_strings(src, moves)
        new = rewrite_imports(new, moves, changed_names, f)
        if new != src:
            try: ast.parse(new)
            except SyntaxError as e: print("SYNTAX", f, e)
            open(f, "w").write(new)
    pat, pathpat, dots, paths = patterns(moves)
    for f in files(".md", ".toml", ".yaml", ".yml", ".txt", "Makefile", ".cfg", ".sh", ".jinja", ".html", ".json"):
        if f.startswith("tests/house/messages"): continue
        try: src = open(f).read()
        except UnicodeDecodeError: continue
        new = pathpat.sub(lambda m: paths[m.group(0)], pat.sub(lambda m: "smelt." + dots[m.group(1)], src)) if dots else src
        if new != src: open(f, "w").write(new)
    clean_packages()
    print("\n".join(report))

def old_path(mod):
    parts = mod.split(".")
    if parts[0] in TOPS: return "/".join(parts) + ".py"
    return "pipeline/" + "/".join(parts) + ".py"

def patterns(moves):
    dots = {o: t for o, t in moves.items() if o != t}
    alts = "|".join(re.escape(o) for o in sorted(dots, key=len, reverse=True))
    pat = re.compile(r"(?<![\w.])smelt\.(" + alts + r")(?![\w])")
    paths = {}
    for o, t in dots.items():
        paths[old_path(o)] = path_of(t); paths[path_of(o)] = path_of(t)
    pathpat = re.compile(r"(?<![\w/.-])(?:" + "|".join(re.escape(p) for p in sorted(paths, key=len, reverse=True)) + r")(?![\w])") 
    return pat, pathpat, dots, paths

def rewrite_strings(src, moves):
    pat, pathpat, dots, paths = patterns(moves)
    if not dots: return src
    lines = src.splitlines(keepends=True); starts = [0]
    for l in lines: starts.append(starts[-1] + len(l))
    # offsets in characters
    edits = []
    for t in tokenize.generate_tokens(io.StringIO(src).readline):
        if t.type in (tokenize.STRING, tokenize.COMMENT):
            new = pat.sub(lambda m: "smelt." + dots[m.group(1)], t.string)
            new = pathpat.sub(lambda m: paths[m.group(0)], new)
            if new != t.string:
                edits.append((starts[t.start[0]-1] + t.start[1], starts[t.end[0]-1] + t.end[1], new))
    for a, b, n in reversed(edits): src = src[:a] + n + src[b:]
    return src

INIT_DOCS = {
 "smelt/data": "Datasets: readers (CSV, JSON, Parquet, images, arrays), splits and labels.",
 "smelt/models": "Models in torch: checkpoints, structure edits, tokenizers, image processors.",
 "smelt/models/families": "Model families: names of their parts and how they are connected, one file each.",
 "smelt/quantization": "Quantized layers, and what the quantization schemes share.",
 "smelt/quantization/schemes": "Quantization schemes: one file per kind of scheme; registry.py lists them.",
 "smelt/calibration": "Activation statistics, and running a model block by block.",
 "smelt/training": "The training loop, its extensions, losses and checkpoints.",
 "smelt/runtimes": "What runs a model: torch, ONNX Runtime, OpenVINO, TensorRT.",
 "smelt/runtimes/third_party": "Third-party ONNX graphs: validated with resource limits, copied, run from arrays to arrays.",
 "smelt/generation": "From logits to tokens: greedy, sampled and beam search, the same for every runtime.",
 "smelt/cli": "The command line.",
 "smelt/pipeline": "Recipes: read, checked, executed.",
 "smelt/pipeline/recipe": "Read recipes and report their mistakes with line numbers.",
 "smelt/pipeline/plan": "Check a recipe before any work.",
 "smelt/pipeline/execute": "Run a plan: steps, scores, latency, report, the run's folder.",
 "smelt/pipeline/inspect": "Inspect models, data and the machine without loading the model, and propose recipes.",
 "compress/prune": "Prune units: heads, neurons, channels, the width of the hidden states.",
}
def clean_packages():
    tops = [SMELT_DIR, *MAPPED]
    for top in tops:
        for folder, dirs, fs in sorted(os.walk(top), key=lambda x: -len(x[0])):
            if "__pycache__" in folder: continue
            import shutil
            entries = [x for x in os.listdir(folder) if x != "__pycache__"]
            if entries == ["__init__.py"]:
                os.remove(folder + "/__init__.py"); shutil.rmtree(folder)
            elif not entries and folder != top: shutil.rmtree(folder)
    for top in tops:
        for folder, dirs, fs in os.walk(top):
            if "__pycache__" in folder: continue
            if any(f.endswith(".py") for f in fs) and "__init__.py" not in fs and "/standalone/parts" not in folder:
                print("needs init", folder)
                open(folder + "/__init__.py", "w").write('"""' + INIT_DOCS.get(folder, "TODO") + '"""\n')

def rewrite_imports(src, moves, renames, f):
    try: tree = ast.parse(src)
    except SyntaxError as e:
        print("cannot parse", f, e); return src
    lines = src.splitlines(keepends=True)
    edits = []; local = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("smelt") and not n.level:
            groups = collections.OrderedDict(); hit = False
            for a in n.names:
                full = n.module[6:] if n.module != "smelt" else ""
                sub = (full + "." if full else "") + a.name
                if full in moves and (moves[full] != full or a.name in renames.get(full, {})):
                    hit = True; nn = renames.get(full, {}).get(a.name, a.name); as_ = a.asname
                    if nn != a.name and not as_: local[a.name] = nn
                    groups.setdefault("smelt." + moves[full], []).append(nn + (f" as {as_}" if as_ else ""))
                elif sub in moves and moves[sub] != sub:
                    hit = True; t = moves[sub]; pkg, _, stem = t.rpartition(".")
                    loc = a.asname or a.name
                    if a.asname is None and stem != a.name:
                        used = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)} | {x.arg for x in ast.walk(tree) if isinstance(x, ast.arg)} | set(re.findall(r"import .*\b" + stem + r"\b", src))
                        if stem in used: txt = f"{stem} as {a.name}"
                        else: txt = stem; local[a.name] = stem
                    else: txt = stem + (f" as {a.asname}" if a.asname else "")
                    groups.setdefault("smelt" + ("." + pkg if pkg else ""), []).append(txt)
                else:
                    groups.setdefault(n.module, []).append(a.name + (f" as {a.asname}" if a.asname else ""))
            if hit:
                ind = " " * n.col_offset
                text = "".join(f"{ind}from {m} import {', '.join(dict.fromkeys(v))}\n" for m, v in groups.items())
                edits.append((n.lineno, n.end_lineno, text, n.col_offset))
        elif isinstance(n, ast.Import):
            for a in n.names:
                if a.name.startswith("smelt.") and a.name[6:] in moves and moves[a.name[6:]] != a.name[6:]:
                    print("import stmt", f, n.lineno, a.name)
                    whole = "import " + ", ".join(("smelt." + moves[x.name[6:]] if x.name[6:] in moves else x.name) + (f" as {x.asname}" if x.asname else "") for x in n.names)
                    edits.append((n.lineno, n.end_lineno, " " * n.col_offset + whole + "\n", n.col_offset))
                    break
    for a, b, text, col in sorted(edits, reverse=True):
        head = lines[a-1][:col]
        if head.strip():  # `x; from a import b`
            print("inline import", f, a); continue
        tail = lines[b-1]
        c = re.search(r"#.*", tail)
        if c and a == b: text = text.rstrip("\n") + "  " + c.group(0).rstrip() + "\n"
        lines[a-1:b] = [text] + [""] * (b - a)
    new = "".join(lines)
    if local: new = rename_tokens(new, local)
    return new

if __name__ == "__main__": main(sys.argv[1])
