"""`kernel-fun demo`: a byte-level language model whose attention is `chunk_kda`, trained on real text.

text.py      bytes to learn from, and bytes held out
model.py     the layer, its chunk form for training and its recurrent form for generation
recipe.py    sizes and learning rates, by device
train.py     the loop
sample.py    generated text, and the agreement of the two forms
report.py    what is left on disk: losses, plot, sample, summary, checkpoint
session.py   all of it in order
"""
