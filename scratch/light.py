import ast,os,sys,collections
HEAVY={'torch','transformers','onnx','onnxruntime','datasets','scipy','sklearn','peft','openvino','sacrebleu','tokenizers','onnxscript','onnx_ir','PIL','pyarrow','huggingface_hub','pydantic','yaml','jinja2','rich','sentencepiece','accelerate','onnxsim'}
def load(root):
    os.chdir(root); mods={}
    for top in ['smelt','compress','export','evaluate','configs']:
        for folder,d,fs in os.walk(top):
            if '/standalone/parts' in folder or '__pycache__' in folder: continue
            for f in fs:
                if f.endswith('.py'):
                    p=os.path.join(folder,f)[:-3].split('/')
                    m='.'.join(p[1:] if top=='smelt' else p)
                    if m.endswith('__init__'): m=m[:-len('__init__')].rstrip('.')
                    mods[m]=os.path.join(folder,f)
    deps={};ext={}
    for m,p in mods.items():
        deps[m]=set();ext[m]=set()
        if '.' in m: pass
        for n in ast.parse(open(p).read()).body:
            if isinstance(n,ast.ImportFrom) and n.module:
                if n.module.startswith('smelt'):
                    base=n.module[6:]
                    for a in n.names:
                        sub=(base+'.' if base else '')+a.name
                        deps[m].add(base if base in mods and sub not in mods else sub if sub in mods else base)
                else: ext[m].add(n.module.split('.')[0])
            elif isinstance(n,ast.Import):
                for a in n.names:
                    if a.name.startswith('smelt'): deps[m].add(a.name[6:])
                    else: ext[m].add(a.name.split('.')[0])
    memo={}
    def clo(m,st=()):
        if m in memo: return memo[m]
        s={x for x in ext.get(m,()) if x in HEAVY}
        for d in deps.get(m,()):
            if d!=m and d in mods and d not in st: s|=clo(d,st+(m,))
        memo[m]=s; return s
    return {m:clo(m) for m in mods}
moves={}
for l in open('/tmp/tools/all.txt'):
    l=l.split('#')[0].strip()
    if l:
        t,_,s=l.partition('=')
        for x in s.split(): moves[x]=t.strip()
old=load('/tmp/w39a'); new=load('/tmp/w39')
out=collections.defaultdict(list)
for m,h in old.items():
    t=moves.get(m,m)
    if t in new:
        more=new[t]-h
        if more: out[t].append((m,sorted(more)))
for t,v in sorted(out.items()):
    print(t); [print('    ',*x) for x in v]
print('=====')
H={'torch','transformers','onnxruntime','peft','datasets'}
os.chdir('/tmp/w39a')
# importers at top level
imp=collections.defaultdict(set)
for top in ['smelt','compress','export','evaluate','configs']:
    for folder,d,fs in os.walk(top):
        if '/standalone/parts' in folder or '__pycache__' in folder: continue
        for f in fs:
            if not f.endswith('.py'): continue
            p=os.path.join(folder,f); parts=p[:-3].split('/'); m='.'.join(parts[1:] if top=='smelt' else parts)
            if m.endswith('.__init__'): m=m[:-9]
            for n in ast.parse(open(p).read()).body:
                if isinstance(n,ast.ImportFrom) and n.module and n.module.startswith('smelt'):
                    base=n.module[6:]
                    for a in n.names:
                        sub=(base+'.' if base else '')+a.name
                        imp[base if base in old else sub].add(m)
by=collections.defaultdict(list)
for x,t in moves.items(): by[t].append(x)
for t,srcs in sorted(by.items()):
    hs={s:old.get(s,set())&H for s in srcs}
    allh=set().union(*hs.values())
    for s in srcs:
        more=allh-hs[s]
        if more:
            out_imp=[m for m in imp[s] if m not in srcs and not (old.get(m,set())>=more)]
            if out_imp: print(t,'|',s,'gains',sorted(more),'| lighter importers:',sorted(out_imp)[:5])
