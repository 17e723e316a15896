//! AdamW with a state that is saved.

use candle_core::Var;
use candle_core::backprop::GradStore;
use candle_nn::ParamsAdamW;
use dcp_core::value::Dict;
use dcp_core::{CheckpointError, Tensor, Value};
use dcp_state::{Optimizer, ParamGroup, ParamId, adam};

use crate::error::CandleError;
use crate::model::{VarMapModel, Variable, set};

/// The AdamW of candle (`candle_nn::AdamW`, 0.11) with the state that it hides.
///
/// A step computes the same bits. Its state and options have the names of `torch.optim.AdamW`: each
/// loads what the other saved. As there, a parameter without a gradient in a step keeps its own
/// number of steps.
#[derive(Debug)]
pub struct AdamW {
    parameters: Vec<Parameter>,
    options: ParamsAdamW,
}

#[derive(Debug)]
struct Parameter {
    variable: Variable,
    moments: Option<Moments>,
}

#[derive(Debug)]
struct Moments {
    steps: u32,
    first: Var,
    second: Var,
}

impl AdamW {
    /// An optimizer of the parameters of a model that are trained, sharded as they are.
    #[must_use]
    pub fn of(model: &VarMapModel, options: ParamsAdamW) -> Self {
        Self::with(model.trained().cloned(), options)
    }

    fn with(variables: impl Iterator<Item = Variable>, options: ParamsAdamW) -> Self {
        let parameter = |variable| Parameter { variable, moments: None };
        Self { parameters: variables.map(parameter).collect(), options }
    }

    /// Learning rate and other options.
    #[must_use]
    pub fn params(&self) -> &ParamsAdamW {
        &self.options
    }

    /// Replaces learning rate and other options.
    pub fn set_params(&mut self, options: ParamsAdamW) {
        self.options = options;
    }
}

impl Parameter {
    fn moments(&mut self) -> candle_core::Result<&mut Moments> {
        let var = &self.variable.var;
        Ok(match &mut self.moments {
            Some(moments) => moments,
            none => none.insert(Moments {
                steps: 0,
                first: Var::zeros(var.shape(), var.dtype(), var.device())?,
                second: Var::zeros(var.shape(), var.dtype(), var.device())?,
            }),
        })
    }

    fn step(&mut self, grads: &GradStore, options: &ParamsAdamW) -> candle_core::Result<()> {
        let var = self.variable.var.clone();
        let Some(gradient) = grads.get(&var) else { return Ok(()) };
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = *options;
        let Moments { steps, first, second } = self.moments()?;
        let step = steps.saturating_add(1);
        let power = i32::try_from(step).unwrap_or(i32::MAX);
        let first_scale = 1.0 / (1.0 - beta1.powi(power));
        let second_scale = 1.0 / (1.0 - beta2.powi(power));
        let next_first = ((first.as_tensor() * beta1)? + (gradient * (1.0 - beta1))?)?;
        let next_second = ((second.as_tensor() * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
        let corrected_first = (&next_first * first_scale)?;
        let corrected_second = (&next_second * second_scale)?;
        let decayed = (var.as_tensor() * (1.0 - lr * weight_decay))?;
        let change = (corrected_first / (corrected_second.sqrt()? + eps)?)?;
        let next = (decayed - (change * lr)?)?;
        first.set(&next_first)?;
        second.set(&next_second)?;
        var.set(&next)?;
        *steps = step;
        Ok(())
    }
}

impl candle_nn::Optimizer for AdamW {
    type Config = ParamsAdamW;

    /// An optimizer of whole variables. [`AdamW::of`] makes that of a model with shards.
    fn new(vars: Vec<Var>, options: ParamsAdamW) -> candle_core::Result<Self> {
        let vars = vars.into_iter().filter(|var| var.dtype().is_float());
        Ok(Self::with(vars.map(Variable::whole), options))
    }

    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        let options = &self.options;
        self.parameters.iter_mut().try_for_each(|parameter| parameter.step(grads, options))
    }

    fn learning_rate(&self) -> f64 {
        self.options.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.options.lr = lr;
    }
}

impl Optimizer for AdamW {
    fn param_groups(&self) -> Result<Vec<ParamGroup>, CheckpointError> {
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.options;
        let betas = Value::Tuple(vec![beta1.into(), beta2.into()]);
        let group = ParamGroup::new(self.parameters.iter().map(|one| one.variable.id()))
            .with("lr", lr)
            .with("betas", betas)
            .with("eps", eps)
            .with("weight_decay", weight_decay);
        Ok(vec![adam::with_defaults(group)])
    }

    fn state(&self) -> Result<Vec<(ParamId, Dict)>, CheckpointError> {
        let mut state = Vec::new();
        for Parameter { variable, moments } in &self.parameters {
            let Some(Moments { steps, first, second }) = moments else { continue };
            let mut dict = Dict::new();
            dict.insert("step", Tensor::from_slice(&[*steps as f32], [0_u64; 0])?);
            dict.insert("exp_avg", variable.tensor_like(first)?);
            dict.insert("exp_avg_sq", variable.tensor_like(second)?);
            state.push((variable.id(), dict));
        }
        Ok(state)
    }

    fn init_state(&mut self) -> Result<(), CheckpointError> {
        for parameter in &mut self.parameters {
            parameter.moments().map_err(CandleError::from)?;
        }
        Ok(())
    }

    fn load(
        &mut self,
        groups: Vec<ParamGroup>,
        state: Vec<(ParamId, Dict)>,
    ) -> Result<(), CheckpointError> {
        for group in groups {
            adam::check_options(&group.options, &[])?;
            load_options(&mut self.options, &group.options)?;
        }
        for (id, dict) in state {
            let found = self.parameters.iter_mut().find(|one| one.variable.id() == id);
            let Some(parameter) = found else { continue };
            let moments = parameter.moments().map_err(CandleError::from)?;
            for (name, var) in [("exp_avg", &moments.first), ("exp_avg_sq", &moments.second)] {
                let loaded = dict.get(name).and_then(Value::as_tensor);
                set(var, loaded.ok_or_else(|| invalid(name, "it is not a tensor"))?)?;
            }
            moments.steps = adam::steps(&dict)?;
        }
        Ok(())
    }
}

fn invalid(key: &str, problem: &str) -> CandleError {
    CandleError::Optimizer { key: key.to_owned(), problem: problem.to_owned() }
}

/// Takes the options that are there.
fn load_options(options: &mut ParamsAdamW, loaded: &Dict) -> Result<(), CandleError> {
    let number = |value: &Value, name: &str| match value {
        Value::Int(number) => Ok(*number as f64),
        Value::Float(number) => Ok(*number),
        _ => Err(invalid(name, "it is not a number")),
    };
    for (name, place) in [
        ("lr", &mut options.lr),
        ("eps", &mut options.eps),
        ("weight_decay", &mut options.weight_decay),
    ] {
        if let Some(value) = loaded.get(name) {
            *place = number(value, name)?;
        }
    }
    match loaded.get("betas") {
        None => {}
        Some(Value::Tuple(betas) | Value::List(betas)) if betas.len() == 2 => {
            options.beta1 = number(&betas[0], "betas")?;
            options.beta2 = number(&betas[1], "betas")?;
        }
        Some(_) => return Err(invalid("betas", "it is not two numbers")),
    }
    Ok(())
}
