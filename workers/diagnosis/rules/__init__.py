"""The rules of the classifier: patterns of log lines and the fault that they indicate. Pure.

Read `rule`, then one file for each kind of fault. Imports only `events`.
"""
