"""The HTTP service: every task of a bundle answers, tasks come and go while it runs."""
