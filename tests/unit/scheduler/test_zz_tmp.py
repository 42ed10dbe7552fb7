from collections import Counter


def test_it(tmp_path):
    import tests.unit.scheduler.test_hybrid_schedules as t, time

    for batch in range(20):
        h = Counter()
        a = time.process_time()
        for seed in range(batch, 500, 20):
            w = t.run_schedule(seed, tmp_path)
            h.update(w.happened)
        print(
            "HAPPENED",
            batch,
            [h[k] for k in sorted(t.EVERY_BATCH)],
            time.process_time() - a,
            flush=True,
        )
    print(sorted(t.EVERY_BATCH))
