//! Python's `str()` of dict keys, from which PyTorch builds the steps of a path.

use super::Value;

/// The maximum nesting depth of tuples.
const MAX_DEPTH: usize = 8;

/// The result of `str(key)` in Python; `None` for values whose text depends on their class.
///
/// PyTorch (2.4 and later) builds the steps of a flattened name from it.
#[must_use]
pub fn python_str(key: &Value) -> Option<String> {
    match key {
        Value::Str(text) => Some((**text).to_owned()),
        other => repr(other, 0),
    }
}

fn repr(value: &Value, depth: usize) -> Option<String> {
    Some(match value {
        Value::None => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Int(n) => n.to_string(),
        Value::BigInt(n) => n.to_string(),
        Value::Float(x) => float_repr(*x),
        Value::Str(text) => str_repr(text),
        // Classes of `torch` that occur as keys, mainly dtypes, print as their name.
        Value::Global(global) if &*global.module == "torch" => global.to_string(),
        Value::Tuple(items) if depth < MAX_DEPTH => {
            let items =
                items.iter().map(|item| repr(item, depth + 1)).collect::<Option<Vec<_>>>()?;
            match &*items {
                [one] => format!("({one},)"),
                many => format!("({})", many.join(", ")),
            }
        }
        _ => return None,
    })
}

/// `float.__repr__`: the shortest digits that round-trip, in exponent form below 1e-4 and from
/// 1e16 on.
fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "nan".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = x.to_string();
        if plain.contains('.') { plain } else { plain + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{mantissa}e{sign}{:02}", exponent.abs())
    }
}

/// `str.__repr__` for printable text: single quotes unless only double quotes avoid an escape.
fn str_repr(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::with_capacity(text.len() + 2);
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_ascii_control() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

#[cfg(test)]
mod tests {
    use crate::state::value::Global;

    use super::*;

    #[test]
    fn keys_print_as_in_python() {
        let cases = [
            (Value::None, "None"),
            (true.into(), "True"),
            ((-7).into(), "-7"),
            (1.0.into(), "1.0"),
            (Value::Float(-0.0), "-0.0"),
            (Value::Float(1e16), "1e+16"),
            (Value::Float(1.5e-5), "1.5e-05"),
            (Value::Float(0.0001), "0.0001"),
            (Value::Float(123_456_789.125), "123456789.125"),
            (Value::Float(1e300), "1e+300"),
            (Value::Float(f64::NEG_INFINITY), "-inf"),
            ("a.b".into(), "a.b"),
            (Value::Tuple(vec![1.into(), "it's".into()]), "(1, \"it's\")"),
            (Value::Tuple(vec!["x".into()]), "('x',)"),
            (Value::Tuple(vec![]), "()"),
            (Value::Global(Global::new("torch", "float32")), "torch.float32"),
        ];
        for (key, text) in cases {
            assert_eq!(python_str(&key).as_deref(), Some(text));
        }
        assert_eq!(python_str(&Value::Set(vec![])), None);
    }
}
