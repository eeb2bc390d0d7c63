put('export.autotune_settings','export.autotune.settings',n='spec2.txt')
