# every dotted smelt module name in strings must exist
import ast,re,subprocess,os,importlib,sys
for f in subprocess.check_output("git ls-files '*.py' '*.md' '*.toml' '*.sh' Makefile",shell=True,text=True).split():
    if not os.path.exists(f): continue
    s=open(f).read()
    for m in set(re.findall(r"smelt(?:\.[a-z_0-9]+)+(?:\.[A-Za-z_]\w*)*",s)):
        parts=m.split('.')
        if parts[1] in ('artifact','yaml','json','egg','md','html'): continue
        ok=False
        for i in range(len(parts),1,-1):
            try:
                o=importlib.import_module('.'.join(parts[:i]))
            except Exception: continue
            try:
                for p in parts[i:]: o=getattr(o,p)
                ok=True
            except AttributeError: pass
            break
        else:
            try:
                import smelt; o=smelt
                for p in parts[1:]: o=getattr(o,p)
                ok=True
            except AttributeError: pass
        if not ok: print(f,m)
