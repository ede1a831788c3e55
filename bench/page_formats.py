"""Sections of the page on formats of state: rates, and what training comes to."""

from page_table import Results, mega, percent, section, table


def formats(results: Results) -> list[str]:
    """A step by what is in which format in memory."""
    lines = section(
        "Formats in memory",
        "One step of AdamW from START to done on a DDR4-1600 channel (8Gb x8, refresh on),",
        f"{results['count']:,} parameters, *measured* in RTL cycles; 16 stand-ins of equal latency",
        "do the arithmetic. *Of DRAM peak* counts each array that is read and each that is",
        "written once; of moments in 8 bits the scales, too, one for 256 elements. Arrays begin in",
        "the same bank, those in 8 bits three beats apart, as they are placed on a DIMM.",
    )
    lines += table(
        ["in memory", "bytes a parameter", "cycles", "million a second at 200 MHz", "of DRAM peak",
         "times as fast", "ratio of bytes"],
        (
            [
                row["formats"],
                f"{row['bytes_per_parameter']:g}",
                f"{row['cycles']:,}",
                mega(row["params_per_s"]),
                percent(row["fraction_of_peak"]),
                f"{row['faster']:.3f}",
                f"{row['fewer_bytes']:.3f}",
            ]
            for row in results["rows"]
        ),
    )  # fmt: skip
    faster = [f"{row['than_bf16']:.3f}" for row in results["rows"] if "than_bf16" in row]
    lines += [
        f"Moments in 8 bits are {', '.join(faster[:-1])} and {faster[-1]} times as fast as those",
        "in bf16, in the order of the rows.",
        "",
    ]
    return lines


def state_losses(results: Results) -> list[str]:
    """Loss by the formats of state, and how it is rounded."""
    base = results["rows"][0]
    lines = section(
        "Loss by the formats of state",
        f"A GPT of {results['parameters']:,} parameters, {results['steps']} steps of AdamW from",
        f"random weights on batches of {results['batch']} x {results['context']} bytes, peak",
        f"learning rate {results['lr']:g}, on `{results['device']}`;",
        f"*measured*, mean of {results['seeds']} seeds, each with weights, batches and random bits",
        "of its own. Loss is in nats a byte, of the last 50 steps of training and on unseen text;",
        "the spread is the largest less the smallest of the seeds. In 8 bits are the moments of",
        "all parameters, also of those with few elements.",
    )
    lines += table(
        ["in memory", "training loss", "spread", "validation loss", "spread", "above fp32"],
        (
            [
                row["formats"],
                f"{row['training_loss']:.4f}",
                f"{row['training_loss_spread']:.4f}",
                f"{row['validation_loss']:.4f}",
                f"{row['validation_loss_spread']:.4f}",
                f"{row['validation_loss'] - base['validation_loss']:+.4f}",
            ]
            for row in results["rows"]
        ),
    )
    lines += ["![Training loss over steps, and its difference from fp32](state_losses.png)", ""]
    return lines
