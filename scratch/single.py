import ast,os,collections,sys
ROOT=sys.argv[1]; os.chdir(ROOT)
mods={}
for top in ['smelt','compress','export','evaluate','configs']:
    for folder,d,fs in os.walk(top):
        if '/standalone/parts' in folder or '__pycache__' in folder: continue
        for f in fs:
            if f.endswith('.py') and f!='__init__.py':
                p=os.path.join(folder,f)[:-3].split('/')
                mods['.'.join(p[1:] if top=='smelt' else p)]=os.path.join(folder,f)
imp=collections.defaultdict(set)
H={'torch','transformers','onnxruntime'}
for m,p in mods.items():
    t=ast.parse(open(p).read())
    for n in ast.walk(t):
        if isinstance(n,ast.ImportFrom) and n.module and n.module.startswith('smelt'):
            base=n.module[6:]
            for a in n.names:
                sub=(base+'.' if base else '')+a.name
                x=base if base in mods else sub if sub in mods else None
                if x: imp[x].add(m)
loc={m:open(p).read().count('\n') for m,p in mods.items()}
one=[(loc[m],m,next(iter(imp[m]))) for m in mods if len(imp[m])==1 and loc[m]<140]
print(len(mods),'modules;',sum(len(imp[m])==1 and loc[m]<100 for m in mods),'single importer < 100;',sum(1 for m in mods if loc[m]<=60),'<= 60 lines')
for x in sorted(one): print(*x, loc[x[2]])
print([ (loc[m],m,len(imp[m])) for m in mods if loc[m]<=70 and len(imp[m])!=1])
