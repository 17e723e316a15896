//! Modules and optimizers of burn in checkpoints.

#![allow(clippy::unwrap_used, reason = "this is a test")]

use burn_core as burn;
use burn_core::Tensor;
use burn_core::module::Module;
use burn_core::tensor::Device;
use burn_nn::{BatchNorm, BatchNormConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use dcp::{StateDict, Stateful, Value};
use dcp_burn::{BurnAdam, BurnModel};
use dcp_state::TrainingState;

#[derive(Module, Debug)]
struct Net {
    linear: Linear,
    norm: LayerNorm,
    batch: BatchNorm,
}

impl Net {
    fn new() -> Self {
        let device = Device::default().autodiff();
        Self {
            linear: LinearConfig::new(3, 4).init(&device),
            norm: LayerNormConfig::new(4).init(&device),
            batch: BatchNormConfig::new(4).init(&device).no_grad(),
        }
    }

    fn forward(&self, rows: Tensor<2>) -> Tensor<2> {
        // burn's own records lack what a thread added to running statistics last, too.
        self.norm.forward(self.linear.forward(rows))
    }
}

fn step(net: Net, optimizer: &mut ModuleOptimizer) -> Net {
    let rows = [[0.5_f32, -1.0, 2.0], [1.5, 0.25, -0.5], [0.0, 1.0, 1.0]];
    let rows = Tensor::<2>::from_data(rows, &Device::default().autodiff());
    let loss = net.forward(rows).powi_scalar(3).mean();
    let gradients = GradientsParams::from_grads(loss.backward(), &net);
    optimizer.step(0.1, net, gradients)
}

fn state_of(net: &Net, optimizer: &ModuleOptimizer, amsgrad: bool) -> StateDict {
    let mut model = BurnModel::new(net.clone());
    let mut adam = BurnAdam::new(optimizer.clone(), &model).option("lr", 0.1).amsgrad(amsgrad);
    TrainingState::new(&mut model, vec![&mut adam]).unwrap().state_dict().unwrap()
}

#[test]
fn names_and_layouts_are_those_of_pytorch() {
    let state = state_of(&Net::new(), &AdamWConfig::new().init(), false);
    let shape = |fqn: &str| {
        let tensor = state.at(fqn).and_then(Value::as_tensor);
        tensor.unwrap_or_else(|| panic!("no {fqn} in {state:?}")).shape().to_vec()
    };
    assert_eq!(shape("model.linear.weight"), [4, 3]);
    assert_eq!(shape("optimizer.state.linear.weight.exp_avg"), [4, 3]);
    assert_eq!(shape("model.norm.weight"), [4]);
    assert_eq!(shape("model.batch.running_mean"), [4]);
    let group = state.at("optimizer.param_groups.0.params").unwrap();
    let Value::List(params) = group else { panic!("{group:?}") };
    let params: Vec<_> = params.iter().filter_map(Value::as_str).collect();
    assert!(params.contains(&"norm.weight"), "{params:?}");
    assert!(!params.contains(&"batch.running_mean"), "a buffer has no state: {params:?}");
}

#[test]
fn what_is_loaded_goes_on_with_the_same_bits() {
    for amsgrad in [false, true] {
        let config = AdamWConfig::new().with_amsgrad(amsgrad);
        let (mut net, mut optimizer) = (Net::new(), config.init());
        for _ in 0..3 {
            net = step(net, &mut optimizer);
        }
        let folder = tempfile::tempdir().unwrap();
        let url = folder.path().to_str().unwrap();
        dcp::save(&state_of(&net, &optimizer, amsgrad), url).blocking().unwrap();

        let mut model = BurnModel::new(Net::new());
        let mut adam = BurnAdam::new(config.init(), &model).amsgrad(amsgrad);
        let mut state = TrainingState::new(&mut model, vec![&mut adam]).unwrap();
        dcp::load(&mut state, url).blocking().unwrap();
        assert_eq!(adam.learning_rate(), Some(0.1));
        let (mut loaded, mut resumed) = (model.into_module(), adam.into_inner());
        for _ in 0..3 {
            (net, loaded) = (step(net, &mut optimizer), step(loaded, &mut resumed));
            let expected = state_of(&net, &optimizer, amsgrad);
            let found = state_of(&loaded, &resumed, amsgrad);
            for part in ["model", "optimizer.state"] {
                let of =
                    |state: &StateDict| state.at(part).and_then(Value::as_dict).unwrap().clone();
                let found = of(&found);
                for (key, value) in of(&expected).iter() {
                    let found = found.get_value(key).unwrap();
                    assert!(found.same(value), "{part}.{key:?}: {found:?}, not {value:?}");
                }
            }
        }
    }
}

#[test]
fn options_that_burn_does_not_compute_are_refused() {
    let (net, optimizer) = (Net::new(), AdamWConfig::new().init());
    let mut state = state_of(&net, &optimizer, false);
    let groups = state.at_mut("optimizer.param_groups").unwrap();
    let Value::List(groups) = groups else { panic!("{groups:?}") };
    let Value::Dict(group) = &mut groups[0] else { panic!("no dict") };
    group.insert("maximize", true);
    let mut model = BurnModel::new(net);
    let mut adam = BurnAdam::new(optimizer, &model);
    let mut target = TrainingState::new(&mut model, vec![&mut adam]).unwrap();
    let error = target.load_state_dict(state).unwrap_err().to_string();
    assert!(error.contains("maximize"), "{error}");
}

#[test]
fn tensors_of_another_shape_are_refused() {
    let (net, optimizer) = (Net::new(), AdamWConfig::new().init());
    let mut state = state_of(&net, &optimizer, false);
    let Some(Value::Dict(model)) = state.get_mut("model") else { panic!("no model") };
    model.insert("linear.weight", dcp::Tensor::zeros(dcp::DType::Float32, [4, 2]).unwrap());
    let mut model = BurnModel::new(net);
    let mut adam = BurnAdam::new(optimizer, &model);
    let mut target = TrainingState::new(&mut model, vec![&mut adam]).unwrap();
    let error = target.load_state_dict(state).unwrap_err().to_string();
    assert!(error.contains("linear.weight"), "{error}");
}
