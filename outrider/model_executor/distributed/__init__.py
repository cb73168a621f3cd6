"""One model over several processes, each on a device of its own: tensor parallel.

Each rank holds its heads of every layer, its columns of every MLP, its rows of the vocabulary, and its heads of the KV
cache. Rank 0 keeps the books, makes the steps and alone reads what is drawn; the others run the same steps. Alone, a
process is rank 0 of one.
"""
