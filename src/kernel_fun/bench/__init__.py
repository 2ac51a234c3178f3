"""Timing protocol and records: what `kernel-fun bench` runs.

    machine.py   devices of this machine, and which backends they can run
    suite.py     what a family registers: shapes, inputs, candidates, oracle, floors
    timing.py    interleaved timing, host time, peak memory, ceilings of the device
    probe.py     one call in a fresh process: first-call time, and peak memory on the CPU
    runner.py    gate, time, row
    record.py    the append-only JSON
    plot.py      bar chart and roofline of a record

docs/benchmarking.md states the protocol.
"""
