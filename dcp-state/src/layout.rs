//! The two layouts of an optimizer's state dict, and both as states and options of parameters.

use std::collections::HashMap;

use dcp_core::value::{Dict, python_str};
use dcp_core::{StateDict, Value};

use crate::error::StateDictError;
use crate::fqn::Fqns;
use crate::model::ParamId;
use crate::optimizer::ParamGroup;

const STATE: &str = "state";
const GROUPS: &str = "param_groups";
const PARAMS: &str = "params";
/// Dicts within the state of a parameter, as in PyTorch's Shampoo.
const MAX_DEPTH: usize = 64;

/// An optimizer's groups and states, as it gives them or as it is to load them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts {
    pub(crate) groups: Vec<ParamGroup>,
    pub(crate) state: HashMap<ParamId, Dict>,
}

impl Parts {
    /// The states by FQN, in the order of the groups.
    fn states(&self, fqns: &Fqns) -> Result<Dict, StateDictError> {
        let mut states = Dict::new();
        for id in self.groups.iter().flat_map(|group| &group.params) {
            if let Some(state) = self.state.get(id) {
                states.insert(fqns.first(*id)?, state.clone());
            }
        }
        Ok(states)
    }

    /// A state dict without the parameters of the groups, for tensors to be exchanged in it.
    pub(crate) fn to_dict(&self, fqns: &Fqns) -> Result<StateDict, StateDictError> {
        let options = |group: &ParamGroup| Value::from(group.options.clone());
        let groups: Vec<_> = self.groups.iter().map(options).collect();
        let state = Value::from(self.states(fqns)?);
        Ok(Dict::from([(STATE, state), (GROUPS, Value::List(groups))]))
    }

    /// These groups with the states and options of [`to_dict`](Self::to_dict).
    pub(crate) fn with_dict(
        mut self,
        mut dict: StateDict,
        fqns: &Fqns,
    ) -> Result<Self, StateDictError> {
        if let Some(Value::Dict(mut states)) = dict.remove(STATE) {
            for id in self.groups.iter().flat_map(|group| &group.params) {
                if let Some(Value::Dict(state)) = states.remove(fqns.first(*id)?) {
                    self.state.insert(*id, state);
                }
            }
        }
        if let Some(Value::List(options)) = dict.remove(GROUPS) {
            for (group, options) in self.groups.iter_mut().zip(options) {
                if let Value::Dict(options) = options {
                    group.options = options;
                }
            }
        }
        Ok(self)
    }
}

/// The nested layout of several optimizers: `state` and `param_groups`.
pub(crate) fn nested(all: &[Parts], fqns: &Fqns) -> Result<StateDict, StateDictError> {
    let (mut states, mut groups) = (Dict::new(), Vec::new());
    for parts in all {
        for (fqn, state) in parts.states(fqns)? {
            states.insert(fqn, state);
        }
        for group in &parts.groups {
            let names = group.params.iter().map(|id| Ok(Value::from(fqns.first(*id)?)));
            let names = names.collect::<Result<Vec<_>, StateDictError>>()?;
            let mut options = group.options.clone();
            options.insert(PARAMS, Value::List(names));
            groups.push(Value::Dict(options));
        }
    }
    Ok(Dict::from([(STATE, Value::Dict(states)), (GROUPS, Value::List(groups))]))
}

/// The flattened layout: `state.<fqn>.<name>` and, for each parameter, `param_groups.<fqn>.<option>`.
pub(crate) fn flattened(all: &[Parts], fqns: &Fqns) -> Result<StateDict, StateDictError> {
    let mut flat = Dict::new();
    for parts in all {
        for (fqn, state) in parts.states(fqns)? {
            let prefix = format!("{STATE}.{}", text(&fqn, STATE)?);
            flatten_into(&mut flat, &prefix, state, MAX_DEPTH)?;
        }
    }
    for group in all.iter().flat_map(|parts| &parts.groups) {
        for id in &group.params {
            for (option, value) in group.options.iter() {
                let prefix = format!("{GROUPS}.{}", fqns.first(*id)?);
                let key = format!("{prefix}.{}", text(option, &prefix)?);
                flat.insert(key, value.clone());
            }
        }
    }
    Ok(flat)
}

fn flatten_into(
    flat: &mut Dict,
    prefix: &str,
    value: Value,
    depth: usize,
) -> Result<(), StateDictError> {
    match value {
        Value::Dict(entries) => {
            let depth = depth.checked_sub(1);
            let depth = depth.ok_or_else(|| invalid(prefix, "it is nested too deeply"))?;
            entries.into_iter().try_for_each(|(key, value)| {
                flatten_into(flat, &format!("{prefix}.{}", text(&key, prefix)?), value, depth)
            })
        }
        Value::Tensor(_) | Value::Bool(_) | Value::Int(_) | Value::BigInt(_) | Value::Float(_) => {
            match flat.insert(prefix, value) {
                None => Ok(()),
                Some(_) => Err(invalid(prefix, "two states flatten to this name")),
            }
        }
        other => {
            let kind = other.kind();
            let problem = format!("the flattened layout has numbers and tensors, not a {kind}");
            Err(invalid(prefix, &problem))
        }
    }
}

/// States and options of parameters, of a state dict in any layout.
#[derive(Debug, Default)]
pub(crate) struct Given {
    state: HashMap<String, Dict>,
    options: HashMap<String, Dict>,
    /// The options of groups without parameters.
    empty: Vec<Dict>,
}

impl Given {
    /// Reads a nested or flattened state dict, or one of `torch.optim`, which has numbers in place
    /// of FQNs.
    pub(crate) fn read(
        state: &StateDict,
        all: &[Parts],
        fqns: &Fqns,
    ) -> Result<Self, StateDictError> {
        match state.get(GROUPS) {
            Some(Value::List(groups)) => Self::nested(state.get(STATE), groups, all, fqns),
            Some(_) => Err(invalid(GROUPS, "it is not a list")),
            None => Self::flattened(state, all, fqns),
        }
    }

    fn nested(
        states: Option<&Value>,
        groups: &[Value],
        all: &[Parts],
        fqns: &Fqns,
    ) -> Result<Self, StateDictError> {
        let mut given = Self::default();
        let mut names = Numbers { all, fqns, are_used: false };
        for (number, group) in groups.iter().enumerate() {
            let key = format!("{GROUPS}.{number}");
            let Value::Dict(group) = group else { return Err(invalid(&key, "it is not a dict")) };
            let mut options = group.clone();
            let (Some(Value::List(params)) | Some(Value::Tuple(params))) = options.remove(PARAMS)
            else {
                return Err(invalid(&key, "it has no list of parameters"));
            };
            if params.is_empty() {
                given.empty.push(options);
                continue;
            }
            for param in &params {
                given.options.insert(names.fqn(param, &key)?, options.clone());
            }
        }
        // Flattening leaves nothing of an empty dict.
        let Some(states) = states else { return Ok(given) };
        let Value::Dict(states) = states else { return Err(invalid(STATE, "it is not a dict")) };
        for (key, state) in states.iter() {
            let Value::Dict(state) = state else {
                return Err(invalid(STATE, "the state of a parameter is not a dict"));
            };
            // Keys are text in a checkpoint.
            let number = key.as_str().filter(|_| names.are_used).and_then(|key| key.parse().ok());
            let key = number.map_or_else(|| key.clone(), Value::Int);
            given.state.insert(names.fqn(&key, STATE)?, state.clone());
        }
        Ok(given)
    }

    fn flattened(flat: &StateDict, all: &[Parts], fqns: &Fqns) -> Result<Self, StateDictError> {
        let mut given = Self::default();
        let known = Known::of(all, fqns)?;
        for (key, value) in flat.iter() {
            let key = text(key, "")?;
            let Some((part, rest)) = key.split_once('.') else {
                return Err(invalid(&key, "it is neither a state nor an option of a parameter"));
            };
            // A parameter that the model lacks is no error: it may be another rank's.
            let Some((fqn, name, own)) = known.split(rest) else { continue };
            match part {
                STATE => {
                    let state = given.state.entry(fqn.to_owned()).or_default();
                    let path: Vec<&str> = match own.is_some_and(|own| own.get(name).is_some()) {
                        true => vec![name],
                        false => name.split('.').collect(),
                    };
                    nest(state, &path, value.clone())
                        .ok_or_else(|| invalid(&key, "it is both a value and a dict of others"))?;
                }
                GROUPS => {
                    let options = given.options.entry(fqn.to_owned()).or_default();
                    options.insert(name, value.clone());
                }
                _ => return Err(invalid(&key, "it is neither a state nor an option")),
            }
        }
        Ok(given)
    }

    /// Takes the groups and states for an optimizer that has `own`. Trained parameters whose
    /// state is absent are appended to `missing`.
    pub(crate) fn for_optimizer(
        &mut self,
        own: &Parts,
        fqns: &Fqns,
        strict: bool,
        missing: &mut Vec<String>,
    ) -> Result<Parts, StateDictError> {
        let mut parts = Parts::default();
        let mut empty = std::mem::take(&mut self.empty).into_iter();
        for group in &own.groups {
            let mut loaded: Option<(&str, &Dict)> = None;
            for id in &group.params {
                let param = fqns.parameter(*id)?;
                // A tied parameter is in the state dict under one of its names.
                let named = |has: &dyn Fn(&str) -> bool| {
                    param.fqns.iter().map(String::as_str).find(|fqn| has(fqn))
                };
                if let Some(fqn) = named(&|fqn| self.options.contains_key(fqn))
                    && let Some(options) = self.options.get(fqn)
                {
                    match loaded {
                        Some((first, of_first)) if strict => same(first, of_first, fqn, options)?,
                        Some(_) => {}
                        None => loaded = Some((fqn, options)),
                    }
                }
                if param.frozen {
                    continue;
                }
                if let Some(fqn) = named(&|fqn| self.state.contains_key(fqn)) {
                    parts.state.insert(*id, self.state.get(fqn).cloned().unwrap_or_default());
                } else if own.state.contains_key(id) {
                    missing.push(format!("{STATE}.{}", fqns.first(*id)?));
                }
            }
            let loaded = match loaded {
                Some((_, options)) => Some(options.clone()),
                None if group.params.is_empty() => empty.next(),
                None => None,
            };
            let mut group = group.clone();
            for (option, value) in loaded.into_iter().flatten() {
                group.options.insert(option, value);
            }
            parts.groups.push(group);
        }
        self.empty = empty.collect();
        Ok(parts)
    }
}

/// Refuses options of two parameters of one group that are not equal.
fn same(
    first: &str,
    of_first: &Dict,
    second: &str,
    of_second: &Dict,
) -> Result<(), StateDictError> {
    let differs = of_second
        .iter()
        .find(|(option, value)| !of_first.get_value(option).is_some_and(|first| first.same(value)));
    let Some((option, _)) = differs else { return Ok(()) };
    let option = python_str(option).unwrap_or_default().to_string();
    let (first, second) = (first.to_owned(), second.to_owned());
    Err(StateDictError::GroupsDiffer { first, second, option })
}

/// Sets a value in nested dicts; `None` where a value is in the way.
fn nest(dict: &mut Dict, path: &[&str], value: Value) -> Option<()> {
    let (first, rest) = path.split_first()?;
    if rest.is_empty() {
        return dict.insert(*first, value).is_none().then_some(());
    }
    if dict.get(first).is_none() {
        dict.insert(*first, Dict::new());
    }
    match dict.get_mut(first)? {
        Value::Dict(inner) if path.len() <= MAX_DEPTH => nest(inner, rest, value),
        _ => None,
    }
}

/// The parameters of an optimizer by number, as `torch.optim` has them.
struct Numbers<'a> {
    all: &'a [Parts],
    fqns: &'a Fqns,
    are_used: bool,
}

impl Numbers<'_> {
    fn fqn(&mut self, param: &Value, key: &str) -> Result<String, StateDictError> {
        match (param, self.all) {
            (Value::Str(fqn), _) => Ok(fqn.to_string()),
            (Value::Int(number), [parts]) => {
                self.are_used = true;
                let mut ids = parts.groups.iter().flat_map(|group| &group.params);
                let id = usize::try_from(*number).ok().and_then(|number| ids.nth(number));
                let id = id.ok_or_else(|| {
                    invalid(key, &format!("the optimizer has no parameter {number}"))
                })?;
                Ok(self.fqns.first(*id)?.to_owned())
            }
            (Value::Int(_), _) => {
                Err(invalid(key, "numbers of parameters are those of one optimizer"))
            }
            (other, _) => {
                let kind = other.kind();
                Err(invalid(key, &format!("a parameter is a name or a number, not a {kind}")))
            }
        }
    }
}

/// All FQNs of the optimizers' parameters, with the states that they have.
struct Known<'a>(HashMap<&'a str, Option<&'a Dict>>);

impl<'a> Known<'a> {
    fn of(all: &'a [Parts], fqns: &'a Fqns) -> Result<Self, StateDictError> {
        let mut known = HashMap::new();
        for parts in all {
            for id in parts.groups.iter().flat_map(|group| &group.params) {
                for fqn in &fqns.parameter(*id)?.fqns {
                    known.insert(fqn.as_str(), parts.state.get(id));
                }
            }
        }
        Ok(Self(known))
    }

    /// Splits `rest` into the FQN that it begins with, the longest of several, and the remainder.
    fn split<'b>(&self, rest: &'b str) -> Option<(&'b str, &'b str, Option<&'a Dict>)> {
        rest.match_indices('.').rev().find_map(|(dot, _)| {
            let (fqn, name) = (rest.get(..dot)?, rest.get(dot + 1..)?);
            Some((fqn, name, *self.0.get(fqn)?))
        })
    }
}

fn text(key: &Value, within: &str) -> Result<String, StateDictError> {
    let text = python_str(key);
    text.map(|text| text.to_string())
        .ok_or_else(|| invalid(within, &format!("a key of type {} has no text", key.kind())))
}

fn invalid(key: &str, problem: &str) -> StateDictError {
    StateDictError::InvalidLayout { key: key.to_owned(), problem: problem.to_owned() }
}
