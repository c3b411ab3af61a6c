"""The elastic harness: torchrun training that survives crashes, joins and leaves.

`agent` joins the process group, `checkpoint` and `data` carry state and position through a crash, `scaling` keeps
learning rate and batch right when the world changes, `config_validator` finds mistakes before they cost anything.
Everything raised on purpose is an `ElasticTrainingError`. Import from the modules; torch is loaded when needed.
"""
