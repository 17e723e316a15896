//! SGD, whose only state is its learning rate.

use candle_core::Var;
use candle_core::backprop::GradStore;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Value};
use dcp_state::{Optimizer, ParamGroup, ParamId};

use crate::error::CandleError;
use crate::model::{VarMapModel, Variable};

/// The SGD of candle (`candle_nn::SGD`, 0.11: no momentum), whose learning rate is saved with the
/// names of its parameters, as `torch.optim.SGD` does.
#[derive(Debug)]
pub struct Sgd {
    parameters: Vec<ParamId>,
    inner: candle_nn::SGD,
}

impl Sgd {
    /// An optimizer of the parameters of a model that are trained.
    ///
    /// # Errors
    ///
    /// As `candle_nn::SGD`.
    pub fn of(model: &VarMapModel, learning_rate: f64) -> candle_core::Result<Self> {
        let vars = model.trained().map(|variable| variable.var.clone()).collect();
        candle_nn::Optimizer::new(vars, learning_rate)
    }
}

impl candle_nn::Optimizer for Sgd {
    type Config = f64;

    fn new(vars: Vec<Var>, learning_rate: f64) -> candle_core::Result<Self> {
        let vars: Vec<_> = vars.into_iter().filter(|var| var.dtype().is_float()).collect();
        let parameters = vars.iter().map(|var| Variable::whole(var.clone()).id()).collect();
        Ok(Self { parameters, inner: candle_nn::SGD::new(vars, learning_rate)? })
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        self.inner.step(grads)
    }

    fn learning_rate(&self) -> f64 {
        self.inner.learning_rate()
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.inner.set_learning_rate(lr);
    }
}

impl Optimizer for Sgd {
    fn param_groups(&self) -> Result<Vec<ParamGroup>, CheckpointError> {
        let lr = candle_nn::Optimizer::learning_rate(&self.inner);
        let group = ParamGroup::new(self.parameters.iter().copied()).with("lr", lr);
        let zeros = ["momentum", "dampening", "weight_decay"];
        let group = zeros.into_iter().fold(group, |group, name| group.with(name, 0.0));
        let off = ["nesterov", "maximize", "differentiable"];
        let group = off.into_iter().fold(group, |group, name| group.with(name, false));
        let unset = ["foreach", "fused"];
        Ok(vec![unset.into_iter().fold(group, |group, name| group.with(name, Value::None))])
    }

    fn state(&self) -> Result<Vec<(ParamId, Dict)>, CheckpointError> {
        Ok(Vec::new())
    }

    fn init_state(&mut self) -> Result<(), CheckpointError> {
        Ok(())
    }

    fn load(
        &mut self,
        groups: Vec<ParamGroup>,
        _state: Vec<(ParamId, Dict)>,
    ) -> Result<(), CheckpointError> {
        for group in groups {
            for (name, expected) in [
                ("momentum", &Value::Float(0.0)),
                ("weight_decay", &Value::Float(0.0)),
                ("maximize", &Value::Bool(false)),
            ] {
                if let Some(value) = group.options.get(name)
                    && !value.same(expected)
                    && value.as_int() != Some(0)
                {
                    return Err(CandleError::Optimizer {
                        key: name.to_owned(),
                        problem: "candle's SGD does not have it".to_owned(),
                    }
                    .into());
                }
            }
            match group.options.get("lr") {
                Some(Value::Float(lr)) => {
                    candle_nn::Optimizer::set_learning_rate(&mut self.inner, *lr);
                }
                Some(Value::Int(lr)) => {
                    candle_nn::Optimizer::set_learning_rate(&mut self.inner, *lr as f64);
                }
                _ => {}
            }
        }
        Ok(())
    }
}
