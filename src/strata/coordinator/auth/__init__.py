"""Who is calling, what they may do, and what is written down about it.

`principals` are callers with a role and perhaps a job; `gatekeeper` finds out who a caller is (a token, a certificate, a
sign-in, the owner of a loopback connection) and refuses; `tokens` keeps what the coordinator gave out; `peers` asks the
kernel who owns a connection; `signing_in` serves the dashboard; `audit_log` remembers.
"""
