"""The solver: an exact multiple-choice knapsack in integers.

Read `candidates`, `knapsack` (the bound) and `core`. `core_bitset` serves inputs with many ties.
Pure; imports numpy and nothing of ours.
"""
