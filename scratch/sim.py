import ast,os,sys,collections
os.chdir('/tmp/w39a')
MAPPED={'compress','export','evaluate','configs'}
mods={}
for top in ['smelt',*MAPPED]:
    for folder,d,fs in os.walk(top):
        if '/standalone/parts' in folder: continue
        for f in fs:
            if f.endswith('.py') and f!='__init__.py':
                p=os.path.join(folder,f)[:-3].split('/')
                m='.'.join(p[1:] if top=='smelt' else p); mods[m]=os.path.join(folder,f)
inits={'smelt/__init__.py'}
moves={}
for spec in sys.argv[1:]:
    for l in open(spec):
        l=l.split('#')[0].split('|')[0].strip()
        if l:
            t,_,s=l.partition('=')
            for x in s.split():
                assert x in mods or x=='cli_main',x
                moves[x]=t.strip()
if 'cli' in mods: moves['cli']='cli.main'
edges=collections.defaultdict(lambda: collections.defaultdict(set))
for m,p in mods.items():
    tree=ast.parse(open(p).read())
    tc=set()
    for n in ast.walk(tree):
        if isinstance(n,ast.If) and 'TYPE_CHECKING' in ast.unparse(n.test):
            for x in ast.walk(n): tc.add(id(x))
    top={id(n) for n in tree.body}
    for n in ast.walk(tree):
        if id(n) in tc: continue
        if isinstance(n,ast.ImportFrom) and n.module and n.module.startswith('smelt'):
            base=n.module[6:]
            for a in n.names:
                sub=(base+'.' if base else '')+a.name
                t=base if base in mods else sub if sub in mods else None
                if t is None: continue
                A,B=moves.get(m,m),moves.get(t,t)
                if A!=B: edges[A][B].add((m,t,a.name,'top' if id(n) in top else 'def'))
def sccs(graph):
    import sys; sys.setrecursionlimit(10000)
    idx={};low={};st=[];on=set();out=[];c=[0]
    def v(x):
        idx[x]=low[x]=c[0];c[0]+=1;st.append(x);on.add(x)
        for y in graph.get(x,()):
            if y not in idx: v(y);low[x]=min(low[x],low[y])
            elif y in on: low[x]=min(low[x],idx[y])
        if low[x]==idx[x]:
            comp=[]
            while True:
                y=st.pop();on.discard(y);comp.append(y)
                if y==x:break
            if len(comp)>1: out.append(comp)
    for x in list(graph): 
        if x not in idx: v(x)
    return out
for kind in (os.environ.get('KIND','top'),):
    g={a:{b for b,r in bs.items() if kind=='all' or any(x[3]=='top' for x in r)} for a,bs in edges.items()}
    for comp in sccs(g):
        print(kind,len(comp),sorted(comp))
        cs=set(comp)
        for a in sorted(comp):
            for b in sorted(g.get(a,())):
                if b in cs:
                    r=[x for x in edges[a][b] if kind=='all' or x[3]=='top']
                    print('   ',a,'->',b,':',sorted({f"{x[0]}->{x[1]}({x[2]})" for x in r})[:4])
