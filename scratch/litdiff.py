# per moved test file: compare multiset of numeric/str-constant-free structure? compare number of parametrize cases & asserts
import subprocess,re,json,ast,os
ren=json.load(open('/tmp/ren.json'))
old=[f for f in subprocess.check_output("git ls-tree -r --name-only 33e101c8",shell=True,text=True).split() if f.endswith('.py')]
def shape(src):
    t=ast.parse(src)
    # node type sequence ignoring names & docstrings
    out=[]
    for n in ast.walk(t):
        if isinstance(n,ast.Constant):
            if isinstance(n.value,str): out.append('s')
            else: out.append(repr(n.value))
        elif not isinstance(n,(ast.Load,ast.Store,ast.alias,ast.ImportFrom)): out.append(type(n).__name__)
    import collections
    return collections.Counter(out)
rows=[]
for f in old:
    g=ren.get(f,f)
    if not os.path.exists(g): print('gone',f); continue
    try: a=shape(subprocess.check_output(['git','show',f'33e101c8:{f}'],text=True)); b=shape(open(g).read())
    except SyntaxError as e: print(e); continue
    d=sum(((a-b)+(b-a)).values())
    if d: rows.append((d,f,g,dict((a-b)),dict(b-a)))
rows.sort(reverse=True,key=lambda r:r[0])
print(len(rows))
for r in rows: 
    print(*r)
gone=[f for f in old if not os.path.exists(ren.get(f,f)) and not f.endswith('__init__.py')]
olds=set(old); newf=[f for f in subprocess.check_output("git ls-files '*.py'",shell=True,text=True).split() if f not in olds and f not in set(ren.values())]
sh={g:shape(open(g).read()) for g in newf}
print('NEW UNPAIRED',len(newf))
for f in gone:
    a=shape(subprocess.check_output(['git','show',f'33e101c8:{f}'],text=True))
    best=sorted((sum(((a-b)+(b-a)).values()),g,dict(a-b),dict(b-a)) for g,b in sh.items())[:1]
    print(f,best)
