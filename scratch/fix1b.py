import re
s=open('/tmp/tools/fix1.py').read()
s=s.replace("assert a in s,(f,a); s=s.replace(a,b)","s=rep(f,s,a,b)")
s=s.replace("def sub(f","def rep(f,s,a,b):\n    if a in s: return s.replace(a,b)\n    if b not in s: print('MISSING',f,a[:80])\n    return s\ndef sub(f",1)
s+='''
sub('tests/house/test_families.py',('    for folder in ("core", "runtime", "compress", "export", "evaluate", "pipeline")\\n    for path in (ROOT / folder).rglob("*.py")\\n','    for folder in ("smelt", "compress", "export", "evaluate")\\n    for path in (ROOT / folder).rglob("*.py")\\n    if path.parent != HOME\\n'),
('SOURCES = sorted(','HOME = ROOT / "smelt" / "models" / "families"\\nSOURCES = sorted('),('(ROOT / "families" / f"{name}.py")','(HOME / f"{name}.py")'),('asks smelt.families','asks smelt.models.families'))
sub('tests/house/test_schemes.py',('FOLDERS = ("core", "families", "runtime", "compress", "export", "evaluate", "pipeline")','FOLDERS = ("smelt", "compress", "export", "evaluate")'),('HOME = ROOT / "runtime" / "schemes"','HOME = ROOT / "smelt" / "quantization" / "schemes"'))
sub('tests/house/test_checkout.py',('str(ROOT / "pipeline/__init__.py"), str(ROOT / "core/__init__.py")','str(ROOT / "smelt/__init__.py"), str(ROOT / "smelt/core/__init__.py")'))
sub('tests/house/test_imports.py',('"smelt.core", "smelt.runtime", "smelt.compress"','"smelt.core", "smelt.runtimes", "smelt.compress"'),
('    "factorize.layer_metrics", "prune.importance.score_units", "prune.width.prune_width",\\n    "drop_layers.select_layers", "drop_layers.drop_parts", "quantize.calibrate_ranges",','    "factorize.layer_metrics", "prune.importance", "prune.width", "drop_layers.select_layers",\\n    "drop_layers.drop_parts", "quantize.ranges",'))
'''
open('/tmp/tools/fix1.py','w').write(s)
