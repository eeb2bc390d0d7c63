import re,sys
S={}
for n in ('spec.txt','spec2.txt'):
    for l in open('/tmp/tools/'+n):
        l=l.split('#')[0].strip()
        if l:
            t,_,s=l.partition('='); S.setdefault(n,{})[t.strip()]=s.split()
def put(t,*srcs,n='spec.txt'):
    for d in S.values():
        for k in list(d):
            d[k]=[x for x in d[k] if x not in srcs]
            if not d[k]: del d[k]
    S[n].setdefault(t,[]); S[n][t]=[*S[n][t],*srcs]
exec(open('/tmp/tools/edits.py').read())
for n,d in S.items():
    open('/tmp/tools/'+n,'w').write('\n'.join(f"{t} = {' '.join(s)}" for t,s in d.items())+'\n')
