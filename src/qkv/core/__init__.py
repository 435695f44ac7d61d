"""The paper, plain: from text files to a translation.

Read the modules in this order; each uses only those before it, and nothing else of qkv:

    errors, files, config, device      failures, atomic files, options, where tensors are
    corpus, tokenizer, dataset         text files in blocks, text as ids, ids on disk
    preparation                        files → prepared text: `prepare`
    batches                            prepared text → updates of padded batches: `PairBatches`
    attention, transformer             the model: `hidden` for training; `encode`, `start`, `step` for search
    loss, optimizer                    label smoothing, Adam, the learning rate
    run, checkpoint                    the run folder: config, tokenizer, weights, state
    search, translate                  model → hypotheses → lines: `search_all`, `translate_lines`
    validation, trainer                held-out loss and BLEU; the update and the loop: `Trainer.fit`

`tests/core_runs.py` connects them in thirty lines: `prepare`, then a `Trainer` over a new `Transformer`.
"""
