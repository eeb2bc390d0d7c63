import ast,subprocess,collections
names=collections.defaultdict(list)
for f in subprocess.check_output("git ls-files '*.py'",shell=True,text=True).split():
    if f.startswith(('tests/','benchmarks/','tools/','docs/')) or f=='setup.py': continue
    for n in ast.parse(open(f).read()).body:
        if isinstance(n,(ast.FunctionDef,ast.ClassDef,ast.AsyncFunctionDef)): t=[n.name]
        elif isinstance(n,ast.Assign): t=[x.id for x in n.targets if isinstance(x,ast.Name)]
        elif isinstance(n,ast.AnnAssign) and isinstance(n.target,ast.Name): t=[n.target.id]
        else: continue
        for x in t:
            if not x.startswith('_'): names[x].append(f)
d={k:v for k,v in names.items() if len(v)>1}
print(len(d))
for k,v in sorted(d.items(),key=lambda x:-len(x[1])): print(len(v),k,*v[:4])
fn=collections.Counter(f.split('/')[-1] for f in subprocess.check_output("git ls-files '*.py'",shell=True,text=True).split() if not f.startswith(('tests/','benchmarks/','tools/')))
print([x for x in fn.most_common(25) if x[1]>1])
