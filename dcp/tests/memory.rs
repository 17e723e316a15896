//! Checkpoints in the memory of the process, which have a URL as those in buckets have.

use dcp::core::registry::StorageOptions;
use dcp::{Checkpointer, DType, StateDict, Tensor};

fn state(byte: u8) -> Result<StateDict, Box<dyn std::error::Error>> {
    let mut state = StateDict::new();
    state.insert("weight", Tensor::replicated(DType::Float32, [2, 2], vec![byte; 16])?);
    state.insert("step", i64::from(byte));
    Ok(state)
}

#[test]
fn what_is_saved_to_a_memory_url_is_loaded_from_it() -> Result<(), Box<dyn std::error::Error>> {
    for (url, byte) in [("memory://saved/step_1", 1), ("memory://saved/step_2", 2)] {
        dcp::save(&state(byte)?, url).blocking()?;
        // A second save to the same place replaces the first.
        dcp::save(&state(byte + 10)?, url).blocking()?;
        let mut restored = state(0)?;
        dcp::load(&mut restored, url).blocking()?;
        let (restored, saved) = (restored.get("weight"), state(byte + 10)?);
        assert!(restored.unwrap().same(saved.get("weight").unwrap()));
    }
    Ok(())
}

#[test]
fn options_that_no_storage_has_are_refused() {
    let storages = dcp::default_storages();
    let storages = storages.options(StorageOptions::new().with("paralelism", "5ec7e7"));
    let saved = Checkpointer::new().storages(storages);
    let error = saved.save(&state(1).unwrap(), "memory://options/a").blocking().unwrap_err();
    let shown = dcp::core::error::error_chain(&error);
    assert!(shown.contains("parallelism") && !shown.contains("5ec7e7"), "{shown}");
}
