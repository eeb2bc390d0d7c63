import pkgutil,importlib,smelt,sys,traceback
bad=0
import os
def walk(p):
    for m in pkgutil.iter_modules(p.__path__,p.__name__+'.'):
        if '.standalone.parts' in m.name or m.name.endswith(('__main__','triton.model','latency.worker')): continue
        try:
            mod=importlib.import_module(m.name)
        except BaseException as e:
            print(m.name,type(e).__name__,str(e)[:200]); continue
        if m.ispkg: walk(mod)
walk(smelt)
for n in ('compress','export','evaluate','configs'): walk(importlib.import_module('smelt.'+n))
