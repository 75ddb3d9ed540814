"""The versions this project is built against: the only place where one is written down in code.

They travel with every run (environment.json, column of table ``environment``). The exact sets of
packages are the hash-locked files under polyaxonfiles/locks; a test keeps both equal.
"""

from __future__ import annotations

#: Raised only when the way of measuring changes; part of every cell key. Each raise has a line in
#: tasks/CHANGES.md.
HARNESS = 1

ENGINE_VERSION = "0.27.0"
TORCH_VERSION = "2.13.0"
TORCHVISION_VERSION = "0.28.0"
BENCH_VERSION = "1.9.1"
PREFECT_VERSION = "3.9.1"
POLYAXON_VERSION = "2.18.0"
HAUPT_VERSION = "2.18.0"
DUCKDB_VERSION = "1.5.6"

#: Format numbers of what is written to disk.
CELL_FORMAT = 1
BUNDLE_FORMAT = 1
PREDICTION_FORMAT = 1
JSON_FORMAT = 1
#: Raised when a parser's change can alter a stored number: ingest then replaces the whole run.
PARSER_VERSION = 6
