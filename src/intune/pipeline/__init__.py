"""The engine: what a pipeline is, and what runs it.

chain, options          what a user wrote
order, sequence         the plan: pure
footprint, ledger       bytes in flight: pure
calls, blocks, gather, tensors   what is done to items
segment, nodes, samples, drawing, run   one epoch: order, admission, picking
scheduler, stage        slots, threads, limits of a stage
trials, growth, waits   what is measured of stages: how they run, what they give, why they do not
process, handle, worker, transport, arena, errors, culprit   worker processes
engine, loader, state   what control and users see
mixing, oversize        what is said of files that do not suit the pipeline
"""
