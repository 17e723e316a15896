//! Tests of what is read from the state of Lightning.

use dcp_core::value::Dict;
use dcp_core::{Dims, Tensor, Value};
use dcp_formats::torch_object::encode_object;

use super::*;

fn dict<const N: usize>(entries: [(&str, Value); N]) -> Value {
    let mut dict = Dict::new();
    for (name, value) in entries {
        dict.insert(name, value);
    }
    Value::Dict(dict)
}

#[test]
fn scores_of_every_dtype_are_read() {
    let scores = [
        (DType::Float64, 1.5_f64.to_le_bytes().to_vec(), 1.5),
        (DType::Float32, 1.5_f32.to_le_bytes().to_vec(), 1.5),
        (DType::Float16, 0x3e00_u16.to_le_bytes().to_vec(), 1.5),
        (DType::Float16, 0x8001_u16.to_le_bytes().to_vec(), -2_f64.powi(-24)),
        (DType::BFloat16, 0xbfc0_u16.to_le_bytes().to_vec(), -1.5),
        (DType::Int64, (-3_i64).to_le_bytes().to_vec(), -3.0),
        (DType::Int32, 3_i32.to_le_bytes().to_vec(), 3.0),
        (DType::Int16, 3_i16.to_le_bytes().to_vec(), 3.0),
        (DType::Int8, 3_i8.to_le_bytes().to_vec(), 3.0),
        (DType::UInt8, vec![200], 200.0),
    ];
    for (dtype, bytes, expected) in scores {
        for shape in [Dims::default(), Dims::from([1])] {
            let score = Tensor::replicated(dtype, shape, bytes.clone()).unwrap();
            let callback = dict([
                ("monitor", Value::Str("loss".into())),
                ("best_model_path", Value::Str("run/step-1.ckpt".into())),
                ("best_k_models", dict([("run/step-1.ckpt", Value::Tensor(score))])),
            ]);
            let state = dict([
                ("global_step", Value::Int(1)),
                ("callbacks", dict([("ModelCheckpoint", callback)])),
            ]);
            let state = encode_object(&state).unwrap().to_vec();
            let read = LightningState::parse(state, "step-1.ckpt").unwrap();
            assert_eq!(read.metrics.get("loss"), Some(&expected), "{dtype:?}");
            assert_eq!(read.best, Best::Paths(vec!["run/step-1.ckpt".to_owned()]));
            assert_eq!(read.step, Some(1));
        }
    }
}
