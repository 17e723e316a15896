//! Name templates with holes for numbers: `decoder.layers.{layer}.mlp.linear_fc2.weight`.

use std::fmt::Write;

/// The most layers, experts or prediction layers that a model may have, and the most instances
/// of one name.
pub(crate) const NUMBER_MAX: u64 = 1 << 16;
pub(crate) const INSTANCES_MAX: u64 = 1 << 22;

/// A number that a name leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Hole {
    /// The layer, from 0.
    Layer,
    /// The expert, from 0.
    Expert,
    /// The layer for multi-token prediction, from 0; Hugging Face counts on from the last layer.
    Mtp,
}

impl Hole {
    const ALL: [(Hole, &'static str); 3] =
        [(Hole::Layer, "{layer}"), (Hole::Expert, "{expert}"), (Hole::Mtp, "{mtp}")];

    pub(crate) fn text(self) -> &'static str {
        match self {
            Hole::Layer => "{layer}",
            Hole::Expert => "{expert}",
            Hole::Mtp => "{mtp}",
        }
    }
}

/// Numbers for the holes of a name. They sort as a model is read: by layer, then by expert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Numbers {
    pub(crate) layer: Option<u64>,
    pub(crate) mtp: Option<u64>,
    pub(crate) expert: Option<u64>,
}

impl Numbers {
    pub(crate) fn get(&self, hole: Hole) -> Option<u64> {
        match hole {
            Hole::Layer => self.layer,
            Hole::Expert => self.expert,
            Hole::Mtp => self.mtp,
        }
    }

    /// Sets a number. Returns false when it is another one already.
    pub(crate) fn set(&mut self, hole: Hole, number: u64) -> bool {
        let slot = match hole {
            Hole::Layer => &mut self.layer,
            Hole::Expert => &mut self.expert,
            Hole::Mtp => &mut self.mtp,
        };
        *slot.get_or_insert(number) == number
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Hole(Hole),
}

/// A name with holes. Some of its numbers may be positions on leading axes of the tensor instead
/// of parts of the name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Template {
    parts: Vec<Part>,
    /// Numbers that are leading axes, outermost first.
    pub(crate) lead: Vec<Hole>,
    /// Whether the name begins with the prefix of its side.
    pub(crate) prefixed: bool,
}

/// The parts of names besides the numbers of layers and experts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Naming {
    /// The prefix of names.
    pub(crate) prefix: String,
    /// The offset that is added to the number of an `{mtp}`.
    pub(crate) mtp_from: u64,
}

impl Template {
    /// Reads a name. `{prefix}` may stand at its beginning, `[{expert}]` at its end says that the
    /// tensor's first axis counts experts.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let bad = |problem: &str| format!("the name {text:?} {problem}");
        let (mut rest, mut lead, mut parts) = (text, Vec::new(), Vec::new());
        let prefixed = rest.starts_with("{prefix}");
        rest = rest.strip_prefix("{prefix}").unwrap_or(rest);
        while let Some((name, hole)) = Hole::ALL.iter().find_map(|(hole, name)| {
            let name_of = rest.strip_suffix(&format!("[{name}]"))?;
            Some((name_of, *hole))
        }) {
            rest = name;
            lead.insert(0, hole);
        }
        while let Some(open) = rest.find(['{', '}', '[', ']']) {
            let (before, from) = rest.split_at(open);
            let Some((hole, name)) = Hole::ALL.iter().find(|(_, name)| from.starts_with(name))
            else {
                return Err(bad(
                    "has a bracket that is no {layer}, {expert} or {mtp}, no {prefix} at its \
                     beginning and no [{layer}] or [{expert}] at its end",
                ));
            };
            if !before.is_empty() {
                parts.push(Part::Text(before.to_owned()));
            } else if matches!(parts.last(), Some(Part::Hole(_))) {
                return Err(bad("has two numbers with nothing between them"));
            }
            parts.push(Part::Hole(*hole));
            rest = from.get(name.len()..).unwrap_or_default();
        }
        if !rest.is_empty() {
            parts.push(Part::Text(rest.to_owned()));
        }
        if parts.is_empty() {
            return Err(bad("is empty"));
        }
        let template = Self { parts, lead, prefixed };
        for (hole, name) in Hole::ALL {
            if template.holes().filter(|h| *h == hole).count() > 1 {
                return Err(bad(&format!("has {name} twice")));
            }
        }
        if template.lead.contains(&Hole::Mtp) {
            return Err(bad("has [{mtp}], but layers for multi-token prediction are not an axis"));
        }
        Ok(template)
    }

    /// All numbers that it leaves open, in the name or as axes.
    pub(crate) fn holes(&self) -> impl Iterator<Item = Hole> {
        let of = |part: &Part| if let Part::Hole(hole) = part { Some(*hole) } else { None };
        self.parts.iter().filter_map(of).chain(self.lead.iter().copied())
    }

    pub(crate) fn has(&self, hole: Hole) -> bool {
        self.holes().any(|h| h == hole)
    }

    /// Whether the whole name is known without any numbers.
    pub(crate) fn is_plain(&self) -> bool {
        self.parts.iter().all(|part| matches!(part, Part::Text(_)))
    }

    /// Returns the template of the same tensors with some numbers as leading axes: a number is
    /// taken out of the name, together with the dot behind it. `None` where there is none to be
    /// taken out.
    pub(crate) fn stacked(&self, holes: &[Hole]) -> Option<Self> {
        let mut stacked = self.clone();
        stacked.lead.clear();
        for &hole in holes {
            let at = stacked.parts.iter().position(|part| *part == Part::Hole(hole))?;
            let Some(Part::Text(behind)) = stacked.parts.get_mut(at + 1) else { return None };
            *behind = behind.strip_prefix('.')?.to_owned();
            stacked.parts.remove(at);
            stacked.lead.push(hole);
        }
        stacked.lead.extend_from_slice(&self.lead);
        Some(stacked)
    }

    /// The numbers in `name`, when it is a name of this form.
    pub(crate) fn numbers(&self, name: &str, naming: &Naming) -> Option<Numbers> {
        let mut rest =
            if self.prefixed { name.strip_prefix(naming.prefix.as_str())? } else { name };
        let mut numbers = Numbers::default();
        for part in &self.parts {
            match part {
                Part::Text(text) => rest = rest.strip_prefix(text.as_str())?,
                Part::Hole(hole) => {
                    let len = rest.bytes().take_while(u8::is_ascii_digit).count();
                    let (digits, behind) = rest.split_at(len);
                    if digits.is_empty() || len > 9 || (len > 1 && digits.starts_with('0')) {
                        return None;
                    }
                    let mut number: u64 = digits.parse().ok()?;
                    if *hole == Hole::Mtp {
                        number = number.checked_sub(naming.mtp_from)?;
                    }
                    if number >= NUMBER_MAX || !numbers.set(*hole, number) {
                        return None;
                    }
                    rest = behind;
                }
            }
        }
        rest.is_empty().then_some(numbers)
    }

    /// The name with numbers put in. Those it has no number for stay open, to be read by people.
    pub(crate) fn name(&self, numbers: &Numbers, naming: &Naming) -> String {
        let mut name = if self.prefixed { naming.prefix.clone() } else { String::new() };
        for part in &self.parts {
            match part {
                Part::Text(text) => name.push_str(text),
                Part::Hole(hole) => {
                    let from = if *hole == Hole::Mtp { naming.mtp_from } else { 0 };
                    match numbers.get(*hole) {
                        // Writing to a string cannot fail.
                        Some(number) => _ = write!(name, "{}", number + from),
                        None => name.push_str(hole.text()),
                    }
                }
            }
        }
        name
    }

    /// The name as it is declared.
    pub(crate) fn text(&self) -> String {
        let mut text = if self.prefixed { "{prefix}".to_owned() } else { String::new() };
        text.push_str(&self.name(&Numbers::default(), &Naming::default()));
        for hole in &self.lead {
            text.push_str(&format!("[{}]", hole.text()));
        }
        text
    }
}

/// Whether `name` is of a form in which `*` matches any text.
pub(crate) fn glob(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let mut pieces = pieces.peekable();
    if pieces.peek().is_none() {
        return rest.is_empty();
    }
    while let Some(piece) = pieces.next() {
        if pieces.peek().is_none() {
            return rest.ends_with(piece);
        }
        let Some(at) = rest.find(piece) else { return false };
        rest = rest.get(at + piece.len()..).unwrap_or_default();
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(layer: Option<u64>, expert: Option<u64>) -> Numbers {
        Numbers { layer, expert, mtp: None }
    }

    #[test]
    fn names_are_matched_and_made() {
        let text = "decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight";
        let template = Template::parse(text).unwrap();
        assert_eq!(template.text(), text);
        let naming = Naming::default();
        let name = "decoder.layers.12.mlp.experts.experts.3.linear_fc1.weight";
        assert_eq!(template.numbers(name, &naming), Some(numbers(Some(12), Some(3))));
        assert_eq!(template.name(&numbers(Some(12), Some(3)), &naming), name);
        for bad in [
            "decoder.layers.012.mlp.experts.experts.3.linear_fc1.weight",
            "decoder.layers.-1.mlp.experts.experts.3.linear_fc1.weight",
            "decoder.layers.99999999999999999999.mlp.experts.experts.3.linear_fc1.weight",
            "decoder.layers.70000.mlp.experts.experts.3.linear_fc1.weight",
            "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weights",
            "decoder.layers.mlp.experts.experts.linear_fc1.weight",
            "xdecoder.layers.1.mlp.experts.experts.3.linear_fc1.weight",
        ] {
            assert_eq!(template.numbers(bad, &naming), None, "{bad}");
        }
    }

    #[test]
    fn numbers_become_axes() {
        let text = "decoder.layers.{layer}.mlp.experts.experts.{expert}.linear_fc1.weight";
        let template = Template::parse(text).unwrap();
        let both = template.stacked(&[Hole::Layer, Hole::Expert]).unwrap();
        assert_eq!(
            both.text(),
            "decoder.layers.mlp.experts.experts.linear_fc1.weight[{layer}][{expert}]"
        );
        assert!(both.is_plain());
        let experts = template.stacked(&[Hole::Expert]).unwrap();
        let name = "decoder.layers.4.mlp.experts.experts.linear_fc1.weight";
        let found = experts.numbers(name, &Naming::default());
        assert_eq!(found, Some(numbers(Some(4), None)));
        let unstackable = Template::parse("x.{layer}.weight{expert}").unwrap();
        assert_eq!(unstackable.stacked(&[Hole::Expert]), None);
    }

    #[test]
    fn prefixes_and_prediction_layers() {
        let template = Template::parse("{prefix}h.{mtp}.eh_proj").unwrap();
        let naming = Naming { prefix: "model.".to_owned(), mtp_from: 61 };
        let numbers = template.numbers("model.h.62.eh_proj", &naming).unwrap();
        assert_eq!(numbers.mtp, Some(1));
        assert_eq!(template.name(&numbers, &naming), "model.h.62.eh_proj");
        assert_eq!(template.numbers("model.h.60.eh_proj", &naming), None);
    }

    #[test]
    fn bad_names_are_refused() {
        for bad in [
            "",
            "{prefix}",
            "a.{block}.b",
            "a.{layer",
            "a}b",
            "{layer}{expert}",
            "a.{layer}.{layer}",
            "a.{prefix}",
            "a[{mtp}]",
            "a[b]",
            "a.{layer}[{layer}]",
        ] {
            assert!(Template::parse(bad).is_err(), "{bad:?}");
        }
        let fused = Template::parse("experts.gate_up_proj[{expert}]").unwrap();
        assert_eq!(fused.lead, [Hole::Expert]);
    }

    #[test]
    fn stars_stand_for_any_text() {
        for (pattern, name, expected) in [
            ("optimizer.*", "optimizer.state.a", true),
            ("optimizer.*", "xoptimizer.state.a", false),
            ("*.inv_freq", "a.b.inv_freq", true),
            ("*.inv_freq", "a.b.inv_freqs", false),
            ("a*b*c", "a__b__c", true),
            ("a*b*c", "a__c__b", false),
            ("*", "", true),
            ("a", "a", true),
            ("a", "ab", false),
            ("*._extra_state*", "x._extra_state/shard_0_1", true),
        ] {
            assert_eq!(glob(pattern, name), expected, "{pattern} {name}");
        }
    }
}
