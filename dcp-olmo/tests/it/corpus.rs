//! Replays the seeds of the fuzz target `olmo_note`, whole, cut short, and damaged.

use std::path::Path;

use crate::targets;

#[test]
fn notes_of_steps_never_do_more_than_fail() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/note");
    let mut count = 0;
    for seed in std::fs::read_dir(seeds).unwrap() {
        let mut bytes = std::fs::read(seed.unwrap().path()).unwrap();
        targets::note(&bytes);
        for at in 0..bytes.len() {
            targets::note(&bytes[..at]);
            for bit in 0..8 {
                bytes[at] ^= 1 << bit;
                targets::note(&bytes);
                bytes[at] ^= 1 << bit;
            }
        }
        count += 1;
    }
    assert!(count >= 6, "{count} seeds");
}
