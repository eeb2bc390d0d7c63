import sys,os,re,collections
sys.argv=['x']; os.environ.update(SMELT_DIR='smelt',MAPPED='compress export evaluate configs')
sys.path.insert(0,'/tmp/tools'); os.chdir('/tmp/w39')
import merge
moves={}
for l in open('/tmp/tools/all.txt'):
    l=l.split('#')[0].strip()
    if l:
        t,_,s=l.partition('=')
        for x in s.split(): moves[x]=t.strip()
moves.pop('cli_main',None)
def build(target,srcs,extra):
    mv=dict(moves); mv.update(extra)
    os.chdir('/tmp/w39a')
    rep=[]
    if len(srcs)==1: out=open(merge.path_of(srcs[0])).read()
    else: out,_=merge.merge(target,srcs,{},rep)
    os.chdir('/tmp/w39')
    out=merge.rewrite_strings(out,mv)
    out=merge.rewrite_imports(out,mv,{},target)
    open(merge.path_of(target),'w').write(out); print(target,out.count('\n'),rep)
X={'compress.factorize.block_by_block':'compress.factorize.block_by_block','compress.quantize.block_by_block':'compress.quantize.block_by_block',
 'compress.share_weights.low_rank_delta':'compress.low_rank_delta','export.onnx_export.settings':'export.onnx_settings','export.autotune.settings':'export.onnx_settings'}
build('compress.factorize.block_by_block',['compress.factorize.block_by_block'],X)
build('compress.factorize.stage',['compress.factorize.stage'],X)
build('compress.quantize.block_by_block',['compress.quantize.block_by_block'],X)
build('compress.quantize.stage',['compress.quantize.stage'],X)
build('compress.share_weights',['compress.share_weights.stage','compress.share_weights.settings'],X)
build('compress.low_rank_delta',['compress.share_weights.low_rank_delta'],X)
build('export.onnx_settings',['export.onnx_export.settings','export.autotune.settings'],X)
build('export.onnx_stage',['export.onnx_stage','export.onnx_export.write_graphs'],X)
# other importers: names moved out
names={'compress.low_rank_delta':'compress.share_weights','export.onnx_settings':'export.onnx_stage','compress.factorize.block_by_block':'compress.factorize.stage','compress.quantize.block_by_block':'compress.quantize.stage'}
import ast
for new,old in names.items():
    defs=set(merge.toplevel(ast.parse(open(merge.path_of(new)).read())))
    for f in merge.files('.py'):
        if f==merge.path_of(new): continue
        s=open(f).read()
        def fix(m):
            items=[x.strip() for x in re.sub(r'[()\n]',' ',m.group(2)).split(',') if x.strip()]
            a=[x for x in items if x.split()[0] in defs]; b=[x for x in items if x.split()[0] not in defs]
            ind=m.group(1)
            out=''
            if b: out+=f'{ind}from smelt.{old} import {", ".join(b)}\n'
            if a: out+=f'{ind}from smelt.{new} import {", ".join(a)}\n'
            return out
        n=re.sub(r'(?m)^([ ]*)from smelt\.'+re.escape(old)+r' import (\([^)]*\)|[^\n]*)\n',fix,s)
        if n!=s: open(f,'w').write(n); print('  ',f)
