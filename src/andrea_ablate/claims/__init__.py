"""The lecture's claims as experiments: what is claimed, the rule that decides, the measurement, the verdict.

How `python -m andrea_ablate.claims run res-delta-sum` finds its way:

- ``topics/residual.yaml`` holds the claim: statement, measurement in words, rule, margin, scale (`claim.Claim`);
- ``topics/residual.py`` holds ``@measures("res-delta-sum")``, a short function ``(claim) -> Measurement``;
- ``probes/`` holds what several claims measure with; ``decide.py`` the rules; ``facts.csv`` the conventions.

To add a measurement:

1. Write ``@measures(id)`` over a function in the Python file of its topic; a new topic file is named in
   ``topics/__init__.py``. Build it of probes. A second, firmer scale is ``@measures(id, at="G1")``.
2. Return ``Measurement(worded=…, corrected=…, controls=…, reported=…)``, tuples of findings that the rules of
   ``decide.py`` return (``within``, ``exact``, ``ratio`` …; ``told`` for a number that decides nothing). Take bounds
   from ``claim.margin``, which stands in the YAML file and was written before the run.
   ``worded`` is the claim as its document words it; ``corrected`` a form that holds where the wording does not: the
   two together give MISSTATED.
3. An identity needs a control: hand the same probe something broken (no residual, no mask, rotated values). It must
   come out CONTRADICTED, else the verdict is INCONCLUSIVE, because the probe sees nothing.
4. What needs trained models asks ``probes/trained.py`` for them, in ``TOPIC_trained.py``: ``tuned(("norm=post",))`` is
   a design at its own best learning rate, ``trained`` one run. They are runs of ``size=toy`` like any others, in
   ``runs/``: what another claim has trained is read, what was interrupted goes on.
5. ``python -m andrea_ablate.claims run ID``, look at ``show ID``, commit ``experiments/results/claims/ID.json``, then
   ``report``. Keep it under a minute of CPU time, with fixed seeds: another run must give the same verdict.
6. A convention needs no Python: name its demands on the fact table as ``cells`` in the YAML file.
"""
