//! What is fuzzed: what the trainer notes about a checkpoint, and names of steps.

use dcp_olmo::{OlmoNote, olmo_step};

/// A `.metadata.json`, and each of its lines as the name of a folder.
pub(crate) fn note(bytes: &[u8]) {
    if let Ok(note) = OlmoNote::parse(bytes) {
        assert_eq!(OlmoNote::parse(bytes).unwrap(), note);
        assert!(note.version.is_none_or(|version| version.len() <= bytes.len()));
    }
    for name in String::from_utf8_lossy(bytes).lines() {
        if let Some(step) = olmo_step(name) {
            assert_eq!(olmo_step(&format!("step{step}")), Some(step));
        }
    }
}
