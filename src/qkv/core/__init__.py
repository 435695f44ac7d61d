"""The paper, plain: from text files to a translation.

Read the modules in this order: errors, files, config, device, corpus, tokenizer, preparation, dataset, batches,
attention, transformer, loss, optimizer, trainer, checkpoint, run, search, validation, translate. They import nothing
else of qkv.
"""
