"""Benchmarks of the product on this machine. Not part of the package that users install.

- `run`, `report`, `limits`: refreshes stage by stage beside their bare limits.
- `contest`, `contest_ways`, `contest_report`: all ways on the same data after the same change. `rivals` and `script_2021` are
  what others do, `bags` compares what each has published with the source.
- `growth`, `growth_run`, `scale`: exponents over rows and changed keys, and what follows from them for larger sizes.
- `check`: what refreshes ask for, in counts, beside `budget.json`.
- `package_*`, `load_run`: the repacking of a large package, and a load of files.
- `docs`, `plots`: what is written of a run; `place`, `machine`, `memory`, `stand_in`: where and on what it takes place.
"""
