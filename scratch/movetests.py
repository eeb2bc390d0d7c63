import os,re,subprocess,collections,json,sys
os.chdir('/tmp/w39')
moves={}
for l in open('/tmp/tools/all.txt'):
    l=l.split('#')[0].strip()
    if l:
        t,_,s=l.partition('=')
        for x in s.split(): moves[x]=t.strip()
moves.pop('cli_main',None)
def oldpkg(testdir): # tests/<...>
    parts=testdir.split('/')[1:]
    if parts[0]=='pipeline': parts=parts[1:]
    return '.'.join(parts)
files=[f for f in subprocess.check_output("git ls-files 'tests/*'",shell=True,text=True).split('\n') if f and os.path.exists(f)]
tests=[f for f in files if re.search(r'/test_\w+\.py$',f) and not f.startswith(('tests/house','tests/support','tests/benchmarks','tests/configs'))]
dirs={os.path.dirname(f) for f in tests}
def pkg_of(target): return target.rpartition('.')[0]
dirmap={}
for d in sorted(dirs):
    p=oldpkg(d)
    if d in ('tests/pipeline/whole','tests/pipeline/faults','tests/pipeline','tests/compress','tests/export','tests/evaluate'): dirmap[d]=d; continue
    cnt=collections.Counter()
    for o,t in moves.items():
        if o.rpartition('.')[0]==p: cnt[pkg_of(t)]+=1
    # modules of p not moved
    folder=('/tmp/w39a/'+(p.replace('.','/') if p.split('.')[0] in('compress','export','evaluate') else 'smelt/'+p.replace('.','/')))
    for f in os.listdir(folder) if os.path.isdir(folder) else []:
        m=p+'.'+f[:-3]
        if f.endswith('.py') and f!='__init__.py' and m not in moves: cnt[p]+=1
    dirmap[d]='tests/'+(cnt.most_common(1)[0][0].replace('.','/') if cnt else '???'+p)
new={};taken={}
for f in tests:
    d,b=os.path.split(f); p=oldpkg(d); x=b[5:-3]
    t=moves.get((p+'.' if p else '')+x)
    nd='tests/'+pkg_of(t).replace('.','/') if t else dirmap[d]
    if d=='tests/pipeline' : nd={'test_cli.py':'tests/cli','test_python.py':'tests/api'}.get(b,'tests/pipeline')
    new[f]=(nd,b)
out=collections.defaultdict(list)
for f,(nd,b) in new.items(): out[nd,b].append(f)
final={}
for (nd,b),fs in out.items():
    if len(fs)==1: final[fs[0]]=f'{nd}/{b}'
    else:
        for f in fs:
            last=os.path.dirname(f).split('/')[-1]
            final[f]=f'{nd}/test_{last}_{b[5:]}' if not f.startswith(nd+'/test') else f'{nd}/{b}'
assert len(set(final.values()))==len(final),[k for k,v in collections.Counter(final.values()).items() if v>1]
for f,g in sorted(final.items()):
    if f!=g:
        os.makedirs(os.path.dirname(g),exist_ok=True); subprocess.check_call(['git','mv','-k',f,g]) if False else os.rename(f,g)
# data beside tests: other files in moved dirs
other=[f for f in files if f not in tests and f.startswith('tests/') and not f.startswith(('tests/house','tests/support','tests/benchmarks','tests/configs'))]
for f in other:
    if os.path.exists(f):
        # nearest mapped dir
        d=os.path.dirname(f); best=None
        while d and d not in dirmap: d=os.path.dirname(d)
        if d in dirmap and dirmap[d]!=d:
            g=dirmap[d]+f[len(d):]; os.makedirs(os.path.dirname(g),exist_ok=True); os.rename(f,g); print('data',f,g)
json.dump(final,open('/tmp/tools/tests_final.json','w'))
for d in sorted({os.path.dirname(g) for g in final.values()}): print(d)
subprocess.call("find tests -type d -empty -delete; find tests -name __pycache__ -prune -exec rm -rf {} +; find tests -type d -empty -delete",shell=True)
# path strings
paths={a[len('tests/'):]:b[len('tests/'):] for a,b in final.items() if a!=b}
pat=re.compile(r'(?<![\w/])(tests/)?('+'|'.join(re.escape(p) for p in sorted(paths,key=len,reverse=True))+r')(?!\w)')
for f in subprocess.check_output("git ls-files -co --exclude-standard",shell=True,text=True).split('\n'):
    if not os.path.exists(f) or not f.endswith(('.py','.md','.toml','Makefile','.sh')): continue
    s=open(f).read(); n=pat.sub(lambda m:(m.group(1) or '')+paths[m.group(2)],s)
    if n!=s: open(f,'w').write(n); print('paths in',f)
# quick
import ast
qf='tests/support/quick.py'; s=open(qf).read()
ns={}; exec(s,ns); Q=ns['QUICK_TESTS']; N=collections.defaultdict(list)
for d,es in Q.items():
    for e in es.split():
        file,sep,name=e.partition('::'); o=f'tests/{d}/{file}.py'; g=final.get(o,o)
        assert os.path.exists(g),(o,g)
        N[os.path.dirname(g)[6:]].append(os.path.basename(g)[:-3]+sep+name)
lines=[]
for d in sorted(N):
    items=sorted(N[d]); one=f'    "{d}": "'+' '.join(items)+'",'
    if len(one)<=108: lines.append(one)
    else: lines.append(f'    "{d}": "{items[0]}"\n'+'\n'.join(f'    " {i}"' for i in items[1:])+',')
s=re.sub(r'QUICK_TESTS: dict\[str, str\] = \{.*?\n\}',lambda m:'QUICK_TESTS: dict[str, str] = {\n'+'\n'.join(lines)+'\n}',s,flags=re.S)
open(qf,'w').write(s)
