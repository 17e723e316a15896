//! The state of burn's Adam and AdamW.

use std::collections::HashMap;
use std::fmt;

use burn_core::module::Module;
use burn_core::tensor::Bytes;
use burn_optim::ModuleOptimizer;
use burn_store::burn_pack::{Reader, Scalar, Tensor as Packed, Writer};
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Tensor, Value};
use dcp_state::{Optimizer, ParamGroup, ParamId, adam};

use crate::error::BurnError;
use crate::model::{BurnModel, Parameter};
use crate::tensor::{packed, unpacked};

/// Burn's names of the moments in the state of a parameter (0.22), and PyTorch's.
const MOMENTS: [(&str, &str); 3] = [
    ("momentum.moment_1", "exp_avg"),
    ("momentum.moment_2", "exp_avg_sq"),
    ("momentum.max_moment_2", "max_exp_avg_sq"),
];
const STEPS: &str = "momentum.time";
const RANK: &str = "__rank";

/// Burn's `Adam` or `AdamW` with the names and layouts of `torch.optim.AdamW`: each loads what the
/// other saved.
///
/// burn gives the learning rate to each step and shows no option of an optimizer, so a program states
/// here those that are to be saved, and reads what was loaded from [`options`](Self::options). PyTorch
/// needs `lr`, `betas`, `eps` and `weight_decay`, which are `None` unless they are stated.
pub struct BurnAdam {
    inner: ModuleOptimizer,
    parameters: Vec<Parameter>,
    options: Dict,
    amsgrad: bool,
}

impl BurnAdam {
    /// An optimizer of the parameters of `model` that require a gradient.
    pub fn new<M: Module>(optimizer: ModuleOptimizer, model: &BurnModel<M>) -> Self {
        let stated = ["lr", "betas", "eps", "weight_decay"].map(|name| (name, Value::None));
        let options = Dict::from(stated);
        Self { inner: optimizer, parameters: model.trained(), options, amsgrad: false }
    }

    /// Adds an option to save, such as `lr`, `betas` or `weight_decay`.
    #[must_use]
    pub fn option(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.options.insert(name, value);
        self
    }

    /// Declares that the optimizer was made with AMSGrad, so a load before its first step has memory for
    /// the maxima.
    #[must_use]
    pub fn amsgrad(mut self, amsgrad: bool) -> Self {
        self.amsgrad = amsgrad;
        self.option("amsgrad", amsgrad)
    }

    /// The options, after a load those that were loaded.
    #[must_use]
    pub fn options(&self) -> &Dict {
        &self.options
    }

    /// The loaded option `lr`, or that which was stated.
    #[must_use]
    pub fn learning_rate(&self) -> Option<f64> {
        self.options.get("lr").and_then(Value::as_float)
    }

    /// The optimizer, with what was loaded.
    #[must_use]
    pub fn into_inner(self) -> ModuleOptimizer {
        self.inner
    }

    fn record(&self) -> Result<Reader, BurnError> {
        let bytes = self.inner.into_bytes().map_err(of_record)?;
        Ok(Reader::from_bytes(bytes)?)
    }

    /// Replaces the states of the parameters in `states`, and keeps the others.
    fn set(&mut self, states: HashMap<u64, State>) -> Result<(), BurnError> {
        let record = self.record()?;
        let (mut scalars, paths) = (record.scalars().clone(), record.metadata().clone());
        let is_kept = |tensor: &Packed| !tensor.param_id.is_some_and(|id| states.contains_key(&id));
        let mut tensors: Vec<_> = record.into_tensors()?.into_iter().filter(is_kept).collect();
        for parameter in &self.parameters {
            let Some(state) = states.get(&parameter.id) else { continue };
            let prefix = parameter.id;
            for (name, tensor) in &state.moments {
                let tensor = packed(name, Some(prefix), tensor)?;
                let mut tensor = parameter.to_burn(tensor);
                if tensor.shape != parameter.tensor.shape {
                    let key = format!("{}.{name}", parameter.tensor.name);
                    let problem = format!(
                        "its shape is {:?}, the parameter's is {:?}",
                        tensor.shape, parameter.tensor.shape
                    );
                    return Err(BurnError::Optimizer { key, problem });
                }
                tensor.name = format!("{prefix}.{name}");
                tensors.push(tensor);
            }
            scalars.insert(format!("{prefix}.{STEPS}"), Scalar::from(state.steps));
            scalars.insert(format!("{prefix}.{RANK}"), Scalar::from(parameter.tensor.shape.len()));
        }
        let writer = paths
            .iter()
            .fold(Writer::new(tensors), |writer, (key, value)| writer.with_metadata(key, value));
        let writer =
            scalars.iter().fold(writer, |writer, (key, value)| writer.with_scalar(key, *value));
        let bytes: Bytes = writer.into_bytes()?;
        self.inner = self.inner.clone().from_bytes(bytes).map_err(of_record)?;
        Ok(())
    }
}

/// The state of one parameter: moments in PyTorch's layout, by burn's names.
struct State {
    moments: Vec<(&'static str, Tensor)>,
    steps: u64,
}

fn of_record(error: impl fmt::Display) -> BurnError {
    BurnError::Optimizer { key: "record".to_owned(), problem: error.to_string() }
}

impl Optimizer for BurnAdam {
    fn param_groups(&self) -> Result<Vec<ParamGroup>, CheckpointError> {
        let mut group = ParamGroup::new(self.parameters.iter().map(|one| ParamId(one.id)));
        group.options = self.options.clone();
        Ok(vec![adam::with_defaults(group)])
    }

    fn state(&self) -> Result<Vec<(ParamId, Dict)>, CheckpointError> {
        let record = self.record()?;
        let scalars = record.scalars().clone();
        let mut moments = HashMap::new();
        for tensor in record.into_tensors().map_err(BurnError::from)? {
            moments.insert(tensor.name.clone(), tensor);
        }
        let mut states = Vec::new();
        for parameter in &self.parameters {
            let prefix = parameter.id;
            let Some(steps) = scalars.get(&format!("{prefix}.{STEPS}")) else { continue };
            let steps = u64::try_from(*steps).map_err(of_record)?;
            let mut state = Dict::new();
            state.insert("step", Tensor::from_slice(&[steps as f32], [0_u64; 0])?);
            for (burn, torch) in MOMENTS {
                if let Some(tensor) = moments.remove(&format!("{prefix}.{burn}")) {
                    state.insert(torch, unpacked(parameter.to_pytorch(tensor))?);
                }
            }
            states.push((ParamId(prefix), state));
        }
        Ok(states)
    }

    fn init_state(&mut self) -> Result<(), CheckpointError> {
        let mut states = HashMap::new();
        for parameter in &self.parameters {
            let like = unpacked(parameter.to_pytorch(parameter.tensor.clone()))?;
            let zeros = || Tensor::zeros(like.dtype(), like.shape().clone());
            let names = MOMENTS.iter().take(if self.amsgrad { 3 } else { 2 });
            let moments = names.map(|(burn, _)| Ok((*burn, zeros()?)));
            let moments = moments.collect::<Result<_, dcp_core::error::TensorError>>()?;
            states.insert(parameter.id, State { moments, steps: 0 });
        }
        Ok(self.set(states)?)
    }

    fn load(
        &mut self,
        groups: Vec<ParamGroup>,
        state: Vec<(ParamId, Dict)>,
    ) -> Result<(), CheckpointError> {
        if let Some(group) = groups.into_iter().next() {
            let supported: &[&str] = if self.amsgrad { &["amsgrad"] } else { &[] };
            adam::check_options(&group.options, supported)?;
            self.options = group.options;
        }
        let mut states = HashMap::new();
        for (id, dict) in state {
            let mut moments = Vec::new();
            for (burn, torch) in MOMENTS {
                match dict.get(torch).and_then(Value::as_tensor) {
                    Some(tensor) => moments.push((burn, tensor.clone())),
                    None if torch.starts_with("max") => {}
                    None => return Err(invalid(torch, "it is not a tensor").into()),
                }
            }
            states.insert(id.0, State { moments, steps: adam::steps(&dict)?.into() });
        }
        Ok(self.set(states)?)
    }
}

fn invalid(key: &str, problem: &str) -> BurnError {
    BurnError::Optimizer { key: key.to_owned(), problem: problem.to_owned() }
}

impl fmt::Debug for BurnAdam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BurnAdam")
            .field("parameters", &self.parameters.len())
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
