//! The optimizer's state dict in memory, in either layout.

use std::sync::Arc;

use dcp_core::value::Dict;
use dcp_core::{StateDict, Value};

use crate::error::OlmoError;
use crate::layout::{OptimizerLayout, names};
use crate::roots::{GROUPS, MODEL, OPTIM, PARAMS, STATE};

fn bad(what: &str, problem: &str) -> OlmoError {
    OlmoError::Optimizer { key: format!("optim.{what}"), problem: problem.to_owned() }
}

impl OptimizerLayout {
    /// The layout of an optimizer's state dict; `None` when it is empty.
    #[must_use]
    pub fn of_state(optim: &StateDict) -> Option<Self> {
        let mut keys = optim.iter().filter_map(|(key, _)| key.as_str());
        let nested = optim.get(STATE).is_some() || optim.get(GROUPS).is_some();
        let is_flat = |key: &str| {
            let after =
                |root| key.strip_prefix(root).is_some_and(|rest: &str| rest.starts_with('.'));
            after(STATE) || after(GROUPS)
        };
        match nested {
            true => Some(Self::Nested),
            false => keys.any(is_flat).then_some(Self::Flat),
        }
    }
}

/// A nested state dict of an optimizer, `{"state": …, "param_groups": […]}`, as the flat one.
/// Tensors share their memory.
///
/// # Errors
///
/// When it is not of that form.
pub fn flatten_optim(optim: &StateDict) -> Result<StateDict, OlmoError> {
    let mut flat = StateDict::new();
    if let Some(state) = optim.get(STATE) {
        let state = state.as_dict().ok_or_else(|| bad(STATE, "it is not a dict"))?;
        for (param, fields) in state.iter() {
            let param = text(param, STATE)?;
            let fields = fields.as_dict().ok_or_else(|| bad(STATE, "it is not a dict of dicts"))?;
            for (field, value) in fields.iter() {
                let field = text(field, STATE)?;
                flat.insert(format!("{STATE}.{param}.{field}"), value.clone());
            }
        }
    }
    for group in groups(optim)? {
        let (members, fields) = group?;
        for param in members {
            for (field, value) in &fields {
                flat.insert(format!("{GROUPS}.{param}.{field}"), (*value).clone());
            }
        }
    }
    Ok(flat)
}

fn text<'v>(key: &'v Value, what: &str) -> Result<&'v str, OlmoError> {
    key.as_str().ok_or_else(|| bad(what, "it has keys that are not text; use names of parameters"))
}

type Group<'s> = (Vec<Arc<str>>, Vec<(&'s str, &'s Value)>);

/// The groups of a nested state dict: their parameters and settings.
fn groups(
    optim: &StateDict,
) -> Result<impl Iterator<Item = Result<Group<'_>, OlmoError>>, OlmoError> {
    let groups = match optim.get(GROUPS) {
        None => &[][..],
        Some(Value::List(groups)) => groups,
        Some(_) => return Err(bad(GROUPS, "it is not a list")),
    };
    Ok(groups.iter().enumerate().map(|(number, group)| {
        let what = format!("{GROUPS}.{number}");
        let group = group.as_dict().ok_or_else(|| bad(&what, "it is not a dict"))?;
        let members = group.get(PARAMS).and_then(names);
        let members = members.ok_or_else(|| bad(&what, "it has no list of parameters by name"))?;
        let fields = group.iter().filter_map(|(key, value)| Some((key.as_str()?, value)));
        Ok((members, fields.filter(|(field, _)| *field != PARAMS).collect()))
    }))
}

/// The parameters of every group of a nested state dict.
pub(crate) fn wanted_groups(optim: &StateDict) -> Result<Vec<Vec<Arc<str>>>, OlmoError> {
    groups(optim)?.map(|group| Ok(group?.0)).collect()
}

/// `{"model": …, "optim": …}`.
pub(crate) fn whole(model: &StateDict, optim: Option<&StateDict>) -> StateDict {
    let mut state = Dict::from([(MODEL, model.clone())]);
    if let Some(optim) = optim {
        state.insert(OPTIM, optim.clone());
    }
    state
}
