"""The rules of the classifier: which words of a log mean which fault. Pure.

Read `rule`, then one file for each kind of fault. Imports nothing of ours.
"""
