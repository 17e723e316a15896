//! The options and the state of `torch.optim.Adam` and `AdamW` (2.15), for optimizers of others that
//! compute the same.

use dcp_core::Value;
use dcp_core::value::Dict;

use crate::error::StateDictError;
use crate::optimizer::ParamGroup;

/// Options that choose how PyTorch computes a step, and not what.
const UNSET: [&str; 2] = ["foreach", "fused"];
/// Options that change what a step computes, with the value at which it is that of the paper.
const FIXED: [(&str, bool); 5] = [
    ("amsgrad", false),
    ("maximize", false),
    ("capturable", false),
    ("differentiable", false),
    ("decoupled_weight_decay", true),
];

/// Adds the options that PyTorch's `AdamW` has besides `lr`, `betas`, `eps` and `weight_decay`, where
/// the group lacks them: PyTorch loads no group without all of them.
///
/// ```
/// use dcp_state::{ParamGroup, ParamId, adam};
///
/// let group = ParamGroup::new([ParamId(0)]).with("lr", 0.1).with("amsgrad", true);
/// let group = adam::with_defaults(group);
/// assert_eq!(group.options.len(), 8);
/// assert!(adam::check_options(&group.options, &["amsgrad"]).is_ok());
/// assert!(adam::check_options(&group.options, &[]).is_err());
/// ```
#[must_use]
pub fn with_defaults(mut group: ParamGroup) -> ParamGroup {
    let fixed = FIXED.iter().map(|(name, value)| (*name, Value::Bool(*value)));
    for (name, value) in fixed.chain(UNSET.map(|name| (name, Value::None))) {
        if group.options.get(name).is_none() {
            group.options.insert(name, value);
        }
    }
    group
}

/// Checks loaded options: those that change what a step computes have their defaults, but for
/// `supported` ones.
///
/// # Errors
///
/// [`StateDictError::InvalidLayout`] with the option's name.
pub fn check_options(options: &Dict, supported: &[&str]) -> Result<(), StateDictError> {
    for (name, expected) in FIXED {
        if let Some(Value::Bool(value)) = options.get(name)
            && *value != expected
            && !supported.contains(&name)
            // It changes where the number of steps is, and no step.
            && name != "capturable"
            && name != "differentiable"
        {
            let problem = format!("it is {value}, which this optimizer does not compute");
            return Err(StateDictError::InvalidLayout { key: name.to_owned(), problem });
        }
    }
    Ok(())
}

/// The number of steps in the state of a parameter: a tensor without axes, or a number as PyTorch had
/// it before 1.12.
///
/// # Errors
///
/// [`StateDictError::InvalidLayout`] when it is neither, or not a whole number below 2^32.
pub fn steps(state: &Dict) -> Result<u32, StateDictError> {
    let invalid = |problem: String| StateDictError::InvalidLayout { key: "step".into(), problem };
    let number = match state.get("step") {
        Some(Value::Int(number)) => *number as f64,
        Some(Value::Float(number)) => *number,
        Some(Value::Tensor(tensor)) => {
            let elements = tensor.to_vec_of::<f32>();
            let elements = elements.map_err(|error| invalid(error.to_string()))?;
            elements.first().copied().map_or(f64::NAN, f64::from)
        }
        _ => return Err(invalid("it is neither a number nor a tensor".into())),
    };
    if !(0.0..=f64::from(u32::MAX)).contains(&number) || number.fract() != 0.0 {
        return Err(invalid(format!("{number} is not a number of steps")));
    }
    Ok(number as u32)
}
