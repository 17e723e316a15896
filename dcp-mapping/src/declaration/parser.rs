//! Parses a mapping declared in TOML.

use std::collections::HashMap;
use std::ops::Range;

use indexmap::IndexMap;
use serde::Deserialize;
use toml::Spanned;

use crate::error::MappingError;
use crate::layout::{Heads, Op, Size};
use crate::mapping::{ConfigRules, Drop, Family, Layers, Mapping, Recognize, Rule};
use crate::template::{Hole, Template};

mod repeat_rules;
mod shape_rules;

use repeat_rules::{CopyTable, RepeatTable};

/// The longest declaration, in bytes.
const LEN_MAX: usize = 256 << 10;
/// Rules of a mapping at most, repeated ones included; those that come with dcp have some 50.
const RULES_MAX: usize = 1 << 12;
/// Bytes of all names that repetitions make.
const REPEATED_TEXT_MAX: usize = 16 * LEN_MAX;

/// The default prefixes of Megatron's names: NeMo's and `torch_dcp`'s wrappers.
const MEGATRON_PREFIXES: &[&str] = &["", "module.", "model.", "model.module.", "model0."];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    family: FamilyTable,
    #[serde(default)]
    recognize: RecognizeTable,
    #[serde(default)]
    drop: DropTable,
    #[serde(default)]
    rule: Vec<Spanned<RuleTable>>,
    #[serde(default)]
    repeat: Vec<Spanned<RepeatTable>>,
    #[serde(default)]
    copy: Vec<Spanned<CopyTable>>,
    #[serde(default)]
    config: ConfigTable,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FamilyTable {
    name: String,
    #[serde(default)]
    title: Option<String>,
    #[serde(default)]
    program: Option<String>,
    #[serde(default)]
    model_types: Vec<String>,
    #[serde(default)]
    hf_prefix: Vec<String>,
    #[serde(default)]
    megatron_prefix: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RecognizeTable {
    has: Vec<Spanned<String>>,
    lacks: Vec<Spanned<String>>,
    gated: Option<bool>,
    args: IndexMap<String, toml::Value>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct DropTable {
    hf: Vec<String>,
    megatron: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct ConfigTable {
    constants: IndexMap<String, toml::Value>,
    defaults: IndexMap<String, toml::Value>,
    required: Vec<String>,
    absent: IndexMap<String, toml::Value>,
    fields: IndexMap<String, String>,
    args: IndexMap<String, toml::Value>,
    usual: IndexMap<String, toml::Value>,
    rope: Option<String>,
    moe_layers: Option<String>,
    window: bool,
    gelu: Option<String>,
    group_score: Option<u64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleTable {
    name: Option<String>,
    hf: Spanned<Names>,
    megatron: Spanned<String>,
    local: Option<Spanned<String>>,
    #[serde(default)]
    also: Vec<Spanned<String>>,
    op: Option<Spanned<String>>,
    axis: Option<usize>,
    sizes: Option<Spanned<Vec<String>>>,
    heads: Option<Spanned<String>>,
    shape: Option<Spanned<Vec<String>>>,
    #[serde(default)]
    transpose: bool,
    #[serde(default)]
    optional: bool,
    layers: Option<Spanned<String>>,
    instead: Option<Spanned<String>>,
    tied_to: Option<Spanned<String>>,
    hf_dtype: Option<Spanned<String>>,
    megatron_dtype: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a name or a list of names")]
enum Names {
    One(String),
    Several(Vec<String>),
}

/// Reads declarations and locates lines.
struct Reader<'a> {
    text: &'a str,
    file: &'a str,
}

pub(crate) fn parse(text: &str, file: &str) -> Result<Mapping, MappingError> {
    let reader = Reader { text, file };
    if text.len() > LEN_MAX {
        return Err(reader.error(&(0..0), format!("it has more than {LEN_MAX} bytes")));
    }
    let parsed: File = toml::from_str(text).map_err(|error| {
        let span = error.span().unwrap_or(0..0);
        reader.error(&span, error.message())
    })?;
    let too_many = |span: &Range<usize>| {
        reader.error(span, format!("it has more than {RULES_MAX} rules, repeated ones included"))
    };
    if let Some(rule) = parsed.rule.get(RULES_MAX) {
        return Err(too_many(&rule.span()));
    }
    let mut rules = Vec::with_capacity(parsed.rule.len());
    let mut rule_lines: Vec<_> = parsed.rule.iter().map(Spanned::span).collect();
    for rule in parsed.rule {
        let span = rule.span();
        rules.push(reader.rule(rule.into_inner(), &span)?);
    }
    let mut text_left = REPEATED_TEXT_MAX;
    for repeat in parsed.repeat {
        let span = repeat.span();
        let more = reader.repeated(repeat.get_ref(), &span, &rules, &mut text_left)?;
        if rules.len() + more.len() > RULES_MAX {
            return Err(too_many(&span));
        }
        rule_lines.extend(more.iter().map(|_| span.clone()));
        rules.extend(more);
    }
    if rules.is_empty() {
        return Err(reader.error(&(0..0), "it has no [[rule]]"));
    }
    reader.check_names(&rules, &rule_lines)?;
    let mut recognize = Recognize {
        gated: parsed.recognize.gated,
        args: json_map(parsed.recognize.args),
        ..Recognize::default()
    };
    for name in parsed.recognize.has {
        recognize.has.push(reader.template(&name, true)?);
    }
    for name in parsed.recognize.lacks {
        recognize.lacks.push(reader.template(&name, true)?);
    }
    let some = |mut prefixes: Vec<String>, usual: &[&str]| {
        if prefixes.is_empty() {
            prefixes = usual.iter().map(|prefix| (*prefix).to_owned()).collect();
        }
        prefixes
    };
    let family = Family {
        title: parsed.family.title.unwrap_or_else(|| parsed.family.name.clone()),
        name: parsed.family.name,
        program: parsed.family.program,
        model_types: parsed.family.model_types,
        hf_prefixes: some(parsed.family.hf_prefix, &[""]),
        megatron_prefixes: some(parsed.family.megatron_prefix, MEGATRON_PREFIXES),
    };
    let config = ConfigRules {
        constants: json_map(parsed.config.constants),
        defaults: json_map(parsed.config.defaults),
        fields: parsed.config.fields,
        required: parsed.config.required,
        absent: json_map(parsed.config.absent),
        args: json_map(parsed.config.args),
        usual: json_map(parsed.config.usual),
        rope: parsed.config.rope,
        moe_layers: parsed.config.moe_layers,
        window: parsed.config.window,
        gelu: parsed.config.gelu,
        group_score: parsed.config.group_score,
    };
    config.check().map_err(|problem| reader.error(&reader.find("[config"), problem))?;
    reader.check_shapes(rules.iter().zip(&rule_lines), &config)?;
    let copies = parsed.copy.iter().map(|copy| reader.copied(copy, &rules));
    let copies = copies.collect::<Result<_, _>>()?;
    let drop = Drop { hf: parsed.drop.hf, megatron: parsed.drop.megatron };
    Ok(Mapping { file: file.to_owned(), family, recognize, drop, rules, copies, config })
}

fn json_map(table: IndexMap<String, toml::Value>) -> serde_json::Map<String, serde_json::Value> {
    // All that TOML has has a form in JSON.
    let json = |value: toml::Value| serde_json::to_value(value).unwrap_or_default();
    table.into_iter().map(|(key, value)| (key, json(value))).collect()
}

impl Reader<'_> {
    fn line(&self, span: &Range<usize>) -> usize {
        let before = self.text.get(..span.start).unwrap_or(self.text);
        before.bytes().filter(|b| *b == b'\n').count() + 1
    }

    fn error(&self, span: &Range<usize>, problem: impl Into<String>) -> MappingError {
        let (file, line) = (self.file.to_owned(), self.line(span));
        MappingError::Declaration { file, line, problem: problem.into() }
    }

    fn find(&self, text: &str) -> Range<usize> {
        let at = self.text.find(text).unwrap_or(0);
        at..at
    }

    fn template(&self, name: &Spanned<String>, megatron: bool) -> Result<Template, MappingError> {
        self.name(name.get_ref(), &name.span(), megatron)
    }

    fn name(
        &self,
        text: &str,
        span: &Range<usize>,
        megatron: bool,
    ) -> Result<Template, MappingError> {
        let mut template = Template::parse(text).map_err(|problem| self.error(span, problem))?;
        if megatron {
            if template.prefixed || !template.lead.is_empty() {
                let problem = format!(
                    "the Megatron name {text:?} needs no {{prefix}} and no axes: wrappers in \
                     front and stacked layers and experts are found by themselves"
                );
                return Err(self.error(span, problem));
            }
            template.prefixed = true;
        }
        Ok(template)
    }

    fn rule(&self, table: RuleTable, span: &Range<usize>) -> Result<Rule, MappingError> {
        let rotary = match table.op.as_ref().filter(|op| op.get_ref() == "rotary") {
            Some(op) => Some(self.rotary(op, &table)?),
            None => None,
        };
        if let (Some(heads), None) = (&table.heads, &rotary) {
            return Err(self.error(&heads.span(), "only \"rotary\" has heads"));
        }
        let hf_span = table.hf.span();
        let names = match table.hf.into_inner() {
            Names::One(name) => vec![name],
            Names::Several(names) => names,
        };
        let hf = names
            .iter()
            .map(|name| self.name(name, &hf_span, false))
            .collect::<Result<Vec<_>, _>>()?;
        let mut megatron = vec![self.template(&table.megatron, true)?];
        let local = match &table.local {
            Some(name) => {
                megatron.push(self.template(name, true)?);
                Some(megatron.len() - 1)
            }
            None => None,
        };
        for name in &table.also {
            megatron.push(self.template(name, true)?);
        }
        let op = match rotary {
            Some(op) => op,
            None => self.op(&table.op, table.axis, table.sizes.as_ref(), hf.len(), span)?,
        };
        let first = self.holes(hf.iter().chain(&megatron), span)?;
        if first.contains(&Hole::Mtp) && first.contains(&Hole::Layer) {
            return Err(self.error(span, "a rule is about {layer} or about {mtp}, not both"));
        }
        let layers = self.layers(table.layers.as_ref())?;
        if layers != Layers::All && !first.contains(&Hole::Layer) {
            return Err(self.error(span, "layers are chosen, but the names have no {layer}"));
        }
        Ok(Rule {
            line: self.line(span),
            name: table.name.unwrap_or_else(|| table.megatron.get_ref().clone()),
            hf,
            megatron,
            local,
            shape: self.shape(table.shape.as_ref(), &op, table.transpose)?,
            op,
            transpose: table.transpose,
            optional: table.optional,
            layers,
            instead: table.instead.map(Spanned::into_inner),
            tied_to: table.tied_to.map(Spanned::into_inner),
            hf_dtype: self.dtype(table.hf_dtype)?,
            megatron_dtype: self.dtype(table.megatron_dtype)?,
        })
    }

    fn layers(&self, layers: Option<&Spanned<String>>) -> Result<Layers, MappingError> {
        let Some(layers) = layers else { return Ok(Layers::All) };
        match layers.get_ref().as_str() {
            "all" => Ok(Layers::All),
            "dense" => Ok(Layers::Dense),
            "moe" => Ok(Layers::Moe),
            other => {
                let problem =
                    format!("there are no layers {other:?}, only \"all\", \"dense\" and \"moe\"");
                Err(self.error(&layers.span(), problem))
            }
        }
    }

    fn dtype(
        &self,
        name: Option<Spanned<String>>,
    ) -> Result<Option<dcp_core::DType>, MappingError> {
        let Some(name) = name else { return Ok(None) };
        match name.get_ref().parse() {
            Ok(dtype) => Ok(Some(dtype)),
            Err(_) => {
                let problem = format!("{:?} is not a dtype such as \"bfloat16\"", name.get_ref());
                Err(self.error(&name.span(), problem))
            }
        }
    }

    /// The numbers that all names of a rule leave open.
    fn holes<'a>(
        &self,
        names: impl Iterator<Item = &'a Template>,
        span: &Range<usize>,
    ) -> Result<Vec<Hole>, MappingError> {
        let mut known: Option<(Vec<Hole>, String)> = None;
        for name in names {
            let mut holes: Vec<_> = name.holes().collect();
            holes.sort_unstable();
            match &known {
                None => known = Some((holes, name.text())),
                Some((first, text)) if *first != holes => {
                    let problem = format!(
                        "the names {text:?} and {:?} do not leave the same numbers open",
                        name.text()
                    );
                    return Err(self.error(span, problem));
                }
                Some(_) => {}
            }
        }
        match known {
            Some((holes, _)) => Ok(holes),
            None => Err(self.error(span, "the rule has no names")),
        }
    }

    fn op(
        &self,
        op: &Option<Spanned<String>>,
        axis: Option<usize>,
        sizes: Option<&Spanned<Vec<String>>>,
        parts: usize,
        rule: &Range<usize>,
    ) -> Result<Op, MappingError> {
        let (name, span) =
            op.as_ref().map_or(("copy", rule.clone()), |op| (op.get_ref().as_str(), op.span()));
        let is_concat = name == "concat";
        if !is_concat && (axis.is_some() || sizes.is_some()) {
            let problem = format!("{name:?} takes no axis and no sizes, only \"concat\" does");
            return Err(self.error(&span, problem));
        }
        let counts: &[usize] = match name {
            "copy" | "vocab" => &[1],
            "qkv" => &[1, 3],
            _ => &[],
        };
        let (op, fits) = match name {
            "copy" => (Op::Copy, counts.contains(&parts)),
            "vocab" => (Op::Vocab, counts.contains(&parts)),
            "qkv" => (Op::Qkv, counts.contains(&parts)),
            "concat" => {
                let sizes = match sizes {
                    None => None,
                    Some(spanned) => Some(self.sizes(spanned, parts)?),
                };
                (Op::Concat { axis: axis.unwrap_or(0), sizes }, parts > 0)
            }
            _ => {
                let problem = format!(
                    "there is no operation {name:?}; there are \"copy\", \"qkv\", \"concat\", \
                     \"vocab\" and \"rotary\""
                );
                return Err(self.error(&span, problem));
            }
        };
        if fits {
            return Ok(op);
        }
        let counts = counts.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
        let counts = if counts.is_empty() { "at least 1".to_owned() } else { counts };
        let problem = format!("{name:?} takes {counts} of Hugging Face's names, not {parts}");
        Err(self.error(&span, problem))
    }

    fn rotary(&self, op: &Spanned<String>, table: &RuleTable) -> Result<Op, MappingError> {
        let is_one = match table.hf.get_ref() {
            Names::One(_) => true,
            Names::Several(names) => names.len() == 1,
        };
        if !is_one || table.axis.is_some() || table.sizes.is_some() || table.transpose {
            let problem = "\"rotary\" takes one of Hugging Face's names, and heads alone";
            return Err(self.error(&op.span(), problem));
        }
        match table.heads.as_ref().map(|heads| heads.get_ref().as_str()) {
            Some("query") => Ok(Op::Rotary(Heads::Query)),
            Some("key") => Ok(Op::Rotary(Heads::Key)),
            _ => Err(self.error(&op.span(), "\"rotary\" has the heads \"query\" or \"key\"")),
        }
    }

    fn sizes(&self, sizes: &Spanned<Vec<String>>, parts: usize) -> Result<Vec<Size>, MappingError> {
        let parsed = sizes.get_ref().iter().map(|size| Size::parse(size));
        let parsed = parsed.collect::<Result<Vec<_>, _>>();
        let parsed = parsed.map_err(|problem| self.error(&sizes.span(), problem))?;
        let rests = parsed.iter().filter(|size| **size == Size::Rest).count();
        if parsed.len() != parts || rests > 1 {
            let problem = format!("{parts} parts have {parts} sizes, at most one of them \"rest\"");
            return Err(self.error(&sizes.span(), problem));
        }
        Ok(parsed)
    }

    /// Names of rules and of what they write are used once; what rules refer to is there.
    fn check_names(&self, rules: &[Rule], spans: &[Range<usize>]) -> Result<(), MappingError> {
        let mut names: HashMap<&str, usize> = HashMap::new();
        let mut written: HashMap<(bool, String, Layers), usize> = HashMap::new();
        for (rule, span) in rules.iter().zip(spans) {
            if let Some(line) = names.insert(&rule.name, rule.line) {
                let problem = format!("the rule at line {line} is called {:?} too", rule.name);
                return Err(self.error(span, problem));
            }
            if rule.instead.is_some() {
                continue;
            }
            let hf = rule.hf.iter().map(|name| (true, name));
            let megatron = rule.megatron.first().into_iter().map(|name| (false, name));
            for (is_hf, name) in hf.chain(megatron) {
                let mut clash = written.insert((is_hf, name.text(), rule.layers), rule.line);
                let others: &[Layers] = match rule.layers {
                    Layers::All => &[Layers::Dense, Layers::Moe],
                    _ => &[Layers::All],
                };
                for other in others {
                    clash = clash.or(written.get(&(is_hf, name.text(), *other)).copied());
                }
                if let Some(line) = clash {
                    let name = name.text();
                    let problem = format!("{name:?} is written by the rule at line {line} too");
                    return Err(self.error(span, problem));
                }
            }
        }
        for (rule, span) in rules.iter().zip(spans) {
            if let Some(instead) = &rule.instead {
                let main = rules.iter().find(|other| other.name == *instead);
                if main.is_none_or(|main| main.instead.is_some()) {
                    let problem = format!("there is no rule {instead:?} that it could replace");
                    return Err(self.error(span, problem));
                }
            }
            if let Some(tied) = &rule.tied_to
                && !rules.iter().any(|other| other.name == *tied && other.line != rule.line)
            {
                let problem = format!("there is no rule {tied:?} that it could be tied to");
                return Err(self.error(span, problem));
            }
        }
        Ok(())
    }
}
