"""The elastic harness: torchrun training that survives crashes, joins and leaves.

The names that users of the harness know, over `strata`: `agent` joins the process group, `checkpoint` and `data` carry
state and position through a crash, `scaling` keeps learning rate and batch right when the world changes,
`config_validator` finds mistakes before they cost anything, `train` is the built-in trainer. What they name lives in
`strata.trainer`; `checkpoint` adapts `strata.checkpoint`. Import from the modules; torch is loaded when needed.
"""
