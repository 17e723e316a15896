//! Memory of other owners is saved and loaded without a copy.

use std::sync::Arc;

use dcp::core::HostMemory;
use dcp::core::memory::{LoanError, scope};
use dcp::{DType, StateDict, Tensor};

#[test]
fn borrowed_slices_and_shared_buffers_are_saved_and_loaded_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().join("step_1").display().to_string();
    // More than a file system writes at once, so that loans go to other threads.
    let weight: Vec<f32> = (0..3 << 20).map(|n| n as f32).collect();
    let bias: Arc<Vec<i64>> = Arc::new(vec![-1, i64::MAX]);
    scope(|scope| {
        let weight =
            Tensor::replicated(DType::Float32, [3, 1 << 20], scope.borrow(&weight)).unwrap();
        let bias = HostMemory::from_owner(Arc::clone(&bias));
        let bias = Tensor::replicated(DType::Int64, [2], bias).unwrap();
        let state = StateDict::from([("weight", weight), ("bias", bias)]);
        dcp::save(&state, &url).blocking().unwrap();
    });
    assert_eq!(Arc::strong_count(&bias), 1);

    let (mut loaded_weight, mut loaded_bias) = (vec![0.0_f32; 3 << 20], [0_i64; 2]);
    let memory = scope(|scope| {
        let memory = scope.borrow_mut(&mut loaded_weight);
        let weight = Tensor::replicated(DType::Float32, [3, 1 << 20], memory.clone()).unwrap();
        let bias = scope.borrow_mut(&mut loaded_bias);
        let bias = Tensor::replicated(DType::Int64, [2], bias).unwrap();
        let mut state = StateDict::from([("weight", weight), ("bias", bias)]);
        dcp::load(&mut state, &url).blocking().unwrap();
        memory
    });
    assert!(loaded_weight == weight);
    assert_eq!(loaded_bias, **bias);
    assert_eq!(memory.read().unwrap_err(), LoanError::Revoked);
}
