//! Parses the YAML that PyYAML's `safe_dump` writes as plain data; tags are ignored.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle};
use serde_json::{Map, Number, Value};

use crate::error::MappingError;

/// The longest file that is read, in bytes.
const LEN_MAX: usize = 16 << 20;
/// The most values there may be, those that anchors repeat included.
const VALUES_MAX: usize = 1 << 18;
/// The most lists and mappings that may lie in each other.
const DEPTH_MAX: usize = 64;

/// Bytes of text that anchors may repeat: so many for each byte of the file, and for any file.
const COPIED_PER_BYTE: usize = 2;
const COPIED_MIN: usize = 1 << 20;

/// A value that may be referred to again.
struct Anchored {
    value: Value,
    extent: Extent,
}

/// The size of a copy of a value.
#[derive(Clone, Copy, Default)]
struct Extent {
    values: usize,
    /// Bytes of text.
    bytes: usize,
    /// Lists and mappings in each other.
    depth: usize,
}

/// A list or a mapping that is not closed yet.
struct Open {
    anchor: usize,
    items: Items,
}

enum Items {
    List(Vec<Value>),
    Mapping(Map<String, Value>, Option<String>),
}

/// The first document of a file that errors call `file`.
pub(crate) fn parse(text: &str, file: &str) -> Result<Value, MappingError> {
    let bad = |line: usize, problem: &str| MappingError::Yaml {
        file: file.to_owned(),
        line,
        problem: problem.to_owned(),
    };
    if text.len() > LEN_MAX {
        return Err(bad(1, &format!("it has more than {LEN_MAX} bytes")));
    }
    let copied = text.len().saturating_mul(COPIED_PER_BYTE).saturating_add(COPIED_MIN);
    let mut builder = Builder { bytes_left: copied, ..Builder::default() };
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| bad(error.marker().line(), error.info()))?;
        let line = span.start.line();
        if builder.take(event).map_err(|problem| bad(line, problem))? {
            break;
        }
    }
    Ok(builder.whole.unwrap_or_default())
}

#[derive(Default)]
struct Builder {
    open: Vec<Open>,
    anchors: HashMap<usize, Anchored>,
    values: usize,
    /// Bytes of text that anchors may still repeat.
    bytes_left: usize,
    whole: Option<Value>,
}

impl Builder {
    /// Returns whether the document is complete.
    fn take(&mut self, event: Event<'_>) -> Result<bool, &'static str> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let plain = style == ScalarStyle::Plain && tag.is_none();
                let value = if plain { scalar(&text) } else { Value::from(&*text) };
                self.value(value, anchor)?;
            }
            Event::SequenceStart(anchor, _) => self.begin(anchor, Items::List(Vec::new()))?,
            Event::MappingStart(anchor, _) => {
                self.begin(anchor, Items::Mapping(Map::new(), None))?;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some(open) = self.open.pop() {
                    let value = match open.items {
                        Items::List(items) => Value::Array(items),
                        Items::Mapping(fields, _) => Value::Object(fields),
                    };
                    self.value(value, open.anchor)?;
                }
            }
            Event::Alias(anchor) => {
                let known = self.anchors.get(&anchor);
                let known = known.ok_or("an alias of what is not complete")?;
                let extent = known.extent;
                if self.open.len() + extent.depth > DEPTH_MAX {
                    return Err("lists and mappings lie too deep in each other");
                }
                self.count(extent)?;
                let known = self.anchors.get(&anchor).map(|known| known.value.clone());
                self.put(known.unwrap_or_default())?;
            }
            Event::DocumentEnd => return Ok(true),
            _ => {}
        }
        Ok(false)
    }

    fn begin(&mut self, anchor: usize, items: Items) -> Result<(), &'static str> {
        if self.open.len() >= DEPTH_MAX {
            return Err("lists and mappings lie too deep in each other");
        }
        self.open.push(Open { anchor, items });
        Ok(())
    }

    fn value(&mut self, value: Value, anchor: usize) -> Result<(), &'static str> {
        self.values += 1;
        if self.values > VALUES_MAX {
            return Err("it has too many values");
        }
        if anchor > 0 {
            let extent = Extent::of(&value);
            self.count(extent)?;
            self.anchors.insert(anchor, Anchored { value: value.clone(), extent });
        }
        self.put(value)
    }

    /// Takes a copy into account before it is made.
    fn count(&mut self, copy: Extent) -> Result<(), &'static str> {
        self.values = self.values.saturating_add(copy.values);
        if self.values > VALUES_MAX {
            return Err("it has too many values");
        }
        let left = self.bytes_left.checked_sub(copy.bytes);
        self.bytes_left = left.ok_or("its anchors repeat more text than the file has")?;
        Ok(())
    }

    fn put(&mut self, value: Value) -> Result<(), &'static str> {
        match self.open.last_mut().map(|open| &mut open.items) {
            None => self.whole = Some(value),
            Some(Items::List(items)) => items.push(value),
            Some(Items::Mapping(fields, name)) => match name.take() {
                Some(name) => _ = fields.insert(name, value),
                None => {
                    *name = Some(match value {
                        Value::String(name) => name,
                        Value::Array(_) | Value::Object(_) => {
                            return Err("a list or a mapping cannot be a key");
                        }
                        other => other.to_string(),
                    });
                }
            },
        }
        Ok(())
    }
}

impl Extent {
    fn of(value: &Value) -> Self {
        let mut all = Self { values: 1, ..Self::default() };
        match value {
            Value::String(text) => all.bytes = text.len(),
            Value::Array(items) => all.add(items.iter()),
            Value::Object(fields) => {
                all.bytes = fields.keys().map(String::len).sum();
                all.add(fields.values());
            }
            _ => {}
        }
        all
    }

    fn add<'a>(&mut self, inner: impl Iterator<Item = &'a Value>) {
        let mut deepest = 0;
        for extent in inner.map(Self::of) {
            self.values += extent.values;
            self.bytes += extent.bytes;
            deepest = deepest.max(extent.depth);
        }
        self.depth = deepest + 1;
    }
}

/// Parses a scalar without quotes, by YAML 1.1 as PyYAML writes it.
fn scalar(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" | "yes" | "Yes" | "YES" | "on" | "On" | "ON" => {
            return Value::Bool(true);
        }
        "false" | "False" | "FALSE" | "no" | "No" | "NO" | "off" | "Off" | "OFF" => {
            return Value::Bool(false);
        }
        _ => {}
    }
    if let Ok(number) = text.parse::<i64>() {
        return number.into();
    }
    // Infinity and words such as nan are no numbers in YAML.
    let number = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    let number = text.parse::<f64>().ok().filter(|_| number).and_then(Number::from_f64);
    number.map_or_else(|| Value::from(text), Value::Number)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(text: &str) -> Value {
        parse(text, "a.yaml").unwrap()
    }

    fn problem(text: &str) -> String {
        parse(text, "a.yaml").unwrap_err().to_string()
    }

    #[test]
    fn what_pyyaml_writes() {
        let text = "\
_target_: a.B
model:
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  betas: &id001
  - 0.9
  - 1.0e-05
  empty: []
  none: null
  again: *id001
  text: 'yes'
  tuple: !!python/tuple
  - -1
  - 0
";
        let expected = json!({ "_target_": "a.B", "model": {
            "activation_func": { "_call_": false, "_target_": "torch.nn.functional.silu" },
            "betas": [0.9, 1e-5], "empty": [], "none": null, "again": [0.9, 1e-5],
            "text": "yes", "tuple": [-1, 0],
        } });
        assert_eq!(read(text), expected);
        assert_eq!(read(""), Value::Null);
        assert_eq!(
            read("a: .inf\nb: nan\nc: 1_000\nd: +3\n"),
            json!({
                "a": ".inf", "b": "nan", "c": "1_000", "d": 3,
            })
        );
    }

    #[test]
    fn bad_files_are_refused() {
        assert_eq!(problem("a: 1\nb: [1\n").split(": ").next(), Some("a.yaml:3"));
        assert!(problem("a:\n  ? [1]\n  : 2\n").contains("cannot be a key"));
        assert!(problem("a: &x\n  b: *x\n").contains("not complete"));
        assert!(problem(&"[".repeat(100)).contains("too deep"));
        // Each line is ten times the one before, or as much deeper.
        let mut bomb = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n".to_owned();
        let mut deep = "a0: &a0 [1]\n".to_owned();
        for at in 1..1000 {
            let last = format!("*a{}", at - 1);
            bomb += &format!("a{at}: &a{at} [{}]\n", [last.as_str(); 10].join(", "));
            deep += &format!("a{at}: &a{at} [{last}]\n");
        }
        assert!(problem(&bomb).contains("too many values"));
        // One long text, as a value, in a list, and as a key; far fewer than the values there may be.
        let long = "x".repeat(1 << 16);
        for anchored in [long.clone(), format!("[{long}]"), format!("{{{long}: 1}}")] {
            let text = format!("a: &a {anchored}\nb: [{}]\n", ["*a"; 1000].join(", "));
            assert!(problem(&text).contains("more text than the file has"), "{anchored:.9}");
            let text = format!("a: &a {anchored}\nb: [*a, *a, *a]\n");
            assert_eq!(read(&text)["b"][2], read(&text)["a"]);
        }
        assert!(problem(&deep).contains("too deep"));
        assert!(problem(&" ".repeat(LEN_MAX + 1)).contains("more than"));
    }
}
