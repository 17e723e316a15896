//! Tensors, models and optimizers of candle in checkpoints.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Init, Optimizer as _, ParamsAdamW, VarMap};
use dcp::core::tensor::ShardData;
use dcp::{LoadMode, StateDict, Stateful, Value};
use dcp_candle::{AdamW, CandleError, Sgd, VarMapModel, from_candle, to_candle};
use dcp_core::Region;
use dcp_state::TrainingState;
use half::{bf16, f16};

const CPU: Device = Device::Cpu;

fn bits(tensor: &Tensor) -> Vec<u32> {
    let all: Vec<f32> = tensor.flatten_all().unwrap().to_vec1().unwrap();
    all.into_iter().map(f32::to_bits).collect()
}

/// A tensor of each element type, with elements of both signs where it has them.
fn every_dtype() -> Vec<(&'static str, Tensor)> {
    let of = |name, tensor: candle_core::Result<Tensor>| (name, tensor.unwrap());
    let bf16s: Vec<_> = [-1.5, 0.0, 3e38].map(bf16::from_f32).to_vec();
    let f16s: Vec<_> = [-1.5, 0.0, 65504.0].map(f16::from_f32).to_vec();
    vec![
        of("u8", Tensor::new(&[0_u8, 1, 255], &CPU)),
        of("u32", Tensor::new(&[0_u32, 1, u32::MAX], &CPU)),
        of("i16", Tensor::new(&[i16::MIN, 1, i16::MAX], &CPU)),
        of("i32", Tensor::new(&[i32::MIN, 1, i32::MAX], &CPU)),
        of("i64", Tensor::new(&[i64::MIN, 1, i64::MAX], &CPU)),
        of("bf16", Tensor::from_vec(bf16s, 3, &CPU)),
        of("f16", Tensor::from_vec(f16s, 3, &CPU)),
        of("f32", Tensor::new(&[-0.0_f32, f32::MIN_POSITIVE, f32::INFINITY], &CPU)),
        of("f64", Tensor::new(&[-0.0_f64, f64::MIN_POSITIVE, f64::INFINITY], &CPU)),
        of(
            "f8e4m3",
            Tensor::new(&[-1.5_f32, 0.0, 448.0], &CPU).and_then(|one| one.to_dtype(DType::F8E4M3)),
        ),
        of("scalar", Tensor::new(7_i64, &CPU)),
        of("empty", Tensor::zeros((0, 3), DType::F32, &CPU)),
    ]
}

#[test]
fn every_dtype_is_saved_from_its_memory_and_loaded_in_place() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().to_str().unwrap();
    let (mut saved, mut zeros) = (StateDict::new(), StateDict::new());
    let mut places = Vec::new();
    for (name, tensor) in every_dtype() {
        saved.insert(name, from_candle(&tensor).unwrap());
        let place = Tensor::zeros(tensor.shape(), tensor.dtype(), &CPU);
        let place = Var::from_tensor(&place.unwrap()).unwrap();
        zeros.insert(name, from_candle(&place).unwrap());
        places.push((tensor, place));
    }
    dcp::save(&saved, url).blocking().unwrap();
    dcp::load(&mut zeros, url).mode(LoadMode::Exact).blocking().unwrap();
    for (tensor, place) in places {
        let of = |tensor: &Tensor| dcp::block_on(bytes(tensor)).unwrap();
        assert_eq!(of(&tensor), of(&place), "{:?}", tensor.dtype());
    }
}

/// All bytes, as a save reads them.
async fn bytes(tensor: &Tensor) -> Vec<u8> {
    let tensor = from_candle(tensor).unwrap();
    let ShardData::Device(memory) = tensor.shards()[0].data() else { panic!("host memory") };
    memory.read(std::slice::from_ref(&(0..memory.byte_len()))).await.unwrap().to_vec()
}

#[test]
fn whole_host_tensors_become_tensors_of_candle() {
    let host = dcp::Tensor::from_slice(&[1_i32, 2, 3, 4, 5, 6], [2, 3]).unwrap();
    let tensor = to_candle(&host, &CPU).unwrap();
    let tensor = tensor.to_dtype(DType::I64).unwrap();
    assert_eq!(tensor.to_vec2::<i64>().unwrap(), [[1, 2, 3], [4, 5, 6]]);
    let bools = dcp::Tensor::zeros(dcp::DType::Bool, [2]).unwrap();
    let error = to_candle(&bools, &CPU).unwrap_err();
    assert!(matches!(error, CandleError::UnsupportedDType { .. }), "{error}");
    let on_device = from_candle(&Tensor::new(1_u8, &CPU).unwrap()).unwrap();
    let error = to_candle(&on_device, &CPU).unwrap_err();
    assert!(matches!(error, CandleError::NotWhole), "{error}");
}

#[test]
fn memory_that_is_not_row_major_is_refused() {
    let transposed = Tensor::zeros((2, 3), DType::F32, &CPU).unwrap().t().unwrap();
    let error = from_candle(&transposed).unwrap_err();
    assert!(matches!(error, CandleError::NotContiguous { .. }), "{error}");
    // A slice of rows is row-major, at an offset.
    let rows = Tensor::new(&[[1_u8, 2], [3, 4], [5, 6]], &CPU).unwrap().narrow(0, 1, 2).unwrap();
    assert_eq!(dcp::block_on(bytes(&rows)).unwrap(), [3, 4, 5, 6]);
}

/// A map with a weight and a bias.
fn variables() -> VarMap {
    let vars = VarMap::new();
    for (name, shape) in [("weight", vec![3, 2]), ("bias", vec![3])] {
        vars.get(shape, name, Init::Randn { mean: 0.0, stdev: 1.0 }, DType::F32, &CPU).unwrap();
    }
    vars
}

fn loss(vars: &[Var]) -> Tensor {
    let all = vars.iter().map(|var| var.sqr().unwrap().sum_all().unwrap());
    all.reduce(|sum, one| (sum + one).unwrap()).unwrap()
}

/// From the same values, step by step.
#[test]
fn a_step_computes_the_bits_of_candles_adamw() {
    let ours = variables().all_vars();
    let theirs: Vec<_> =
        ours.iter().map(|var| Var::from_tensor(&var.copy().unwrap()).unwrap()).collect();
    let options = ParamsAdamW { lr: 0.1, weight_decay: 0.05, ..ParamsAdamW::default() };
    let mut our_adamw = AdamW::new(ours.clone(), options.clone()).unwrap();
    let mut their_adamw = candle_nn::AdamW::new(theirs.clone(), options).unwrap();
    for step in 0..20 {
        our_adamw.backward_step(&loss(&ours)).unwrap();
        their_adamw.backward_step(&loss(&theirs)).unwrap();
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert_eq!(bits(ours), bits(theirs), "step {step}");
        }
    }
}

#[test]
fn options_of_optimizers_are_loaded_and_checked() {
    let vars = variables();
    let mut model = VarMapModel::new(&vars);
    let of = |lr| ParamsAdamW { lr, beta1: 0.5, ..ParamsAdamW::default() };
    let mut saved = AdamW::of(&model, of(0.25));
    let state = TrainingState::new(&mut model, vec![&mut saved]).unwrap().state_dict().unwrap();

    let mut loaded = AdamW::of(&model, ParamsAdamW::default());
    let mut target = TrainingState::new(&mut model, vec![&mut loaded]).unwrap();
    target.load_state_dict(state.clone()).unwrap();
    assert_eq!((loaded.params().lr, loaded.params().beta1), (0.25, 0.5));

    let mut amsgrad = state.clone();
    let groups = amsgrad.at_mut("optimizer.param_groups").unwrap();
    let Value::List(groups) = groups else { panic!("{groups:?}") };
    let Value::Dict(group) = &mut groups[0] else { panic!("no dict") };
    group.insert("amsgrad", true);
    let mut target = TrainingState::new(&mut model, vec![&mut loaded]).unwrap();
    let error = target.load_state_dict(amsgrad).unwrap_err().to_string();
    assert!(error.contains("amsgrad"), "{error}");

    let mut sgd = Sgd::of(&model, 0.5).unwrap();
    let state = TrainingState::new(&mut model, vec![&mut sgd]).unwrap().state_dict().unwrap();
    let mut other = Sgd::of(&model, 0.1).unwrap();
    TrainingState::new(&mut model, vec![&mut other]).unwrap().load_state_dict(state).unwrap();
    assert_eq!(other.learning_rate(), 0.5);
}

#[test]
fn buffers_and_frozen_parameters_have_no_state() {
    let vars = variables();
    let mut model = VarMapModel::new(&vars).buffer("bias").unwrap();
    let mut adamw = AdamW::of(&model, ParamsAdamW::default());
    let state = TrainingState::new(&mut model, vec![&mut adamw]).unwrap().state_dict().unwrap();
    assert!(state.at("model.bias").is_some());
    let of_optimizer = state.at("optimizer.state").and_then(Value::as_dict).unwrap();
    assert!(of_optimizer.get("weight").is_some());
    assert!(of_optimizer.get("bias").is_none());
    let error = VarMapModel::new(&vars).frozen("weigth").unwrap_err();
    assert!(matches!(error, CandleError::UnknownVariable { .. }), "{error}");
    let region = Region::new([0, 0], [2, 2]).unwrap();
    let error = VarMapModel::new(&vars).shard("weight", [6, 2], region).unwrap_err();
    assert!(matches!(error, CandleError::Tensor(_)), "{error}");
}
