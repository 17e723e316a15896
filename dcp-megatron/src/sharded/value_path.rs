//! Paths into state, as messages show them.

use dcp_core::Value;

/// A key as a step of a path that people read.
pub(crate) fn step(key: &Value) -> String {
    dcp_core::value::python_str(key).unwrap_or_else(|| format!("<{}>", key.kind()))
}

/// The path of the innermost part that `is_bad`, its steps joined by dots: keys, positions, and
/// names of attributes. Empty when it is the whole.
pub(crate) fn culprit(whole: &Value, is_bad: &dyn Fn(&Value) -> bool) -> String {
    let mut path: Vec<String> = Vec::new();
    let mut at = whole;
    loop {
        let found = match at {
            Value::Dict(dict) => {
                dict.iter().find(|(_, part)| is_bad(part)).map(|(key, part)| (step(key), part))
            }
            Value::List(items) | Value::Tuple(items) => {
                let found = items.iter().enumerate().find(|(_, part)| is_bad(part));
                found.map(|(number, part)| (number.to_string(), part))
            }
            // Attributes have no step of their own: the state is what holds them.
            Value::Object(object) => match &object.state {
                Some(state) if is_bad(state) => {
                    at = state;
                    continue;
                }
                _ => None,
            },
            _ => None,
        };
        let Some((step, part)) = found else { return path.join(".") };
        path.push(step);
        at = part;
    }
}
