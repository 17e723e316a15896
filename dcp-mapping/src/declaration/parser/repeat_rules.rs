//! Declarations that expand to several rules: layers under other names, copies of a tensor.

use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;

use super::Reader;
use crate::error::MappingError;
use crate::mapping::{Copied, Layers, Rule};
use crate::template::{Hole, Template};

/// Rules once more, under other names.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RepeatTable {
    hf: [String; 2],
    megatron: [String; 2],
    layers: Option<Spanned<String>>,
}

/// A tensor of Hugging Face's that is what a rule makes, once more.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CopyTable {
    hf: Spanned<String>,
    of: Spanned<String>,
}

impl Reader<'_> {
    /// The rules that are about layers of a kind, with other beginnings of their names, whose text
    /// is taken off `text_left`: each repetition repeats those before it.
    pub(super) fn repeated(
        &self,
        repeat: &RepeatTable,
        span: &Range<usize>,
        rules: &[Rule],
        text_left: &mut usize,
    ) -> Result<Vec<Rule>, MappingError> {
        let kind = self.layers(repeat.layers.as_ref())?;
        let renamed = |template: &Template, names: &[String; 2], megatron: bool| {
            let text = template.text();
            let bare = if megatron { text.replacen("{prefix}", "", 1) } else { text };
            match bare.strip_prefix(names[0].as_str()) {
                Some(rest) => {
                    Ok(Some(self.name(&format!("{}{rest}", names[1]), span, megatron)?))
                }
                None => Ok(None),
            }
        };
        let line = self.line(span);
        let mut all = Vec::new();
        for rule in rules.iter().filter(|rule| [Layers::All, kind].contains(&rule.layers)) {
            let of = |names: &[Template], by: &[String; 2], megatron| {
                let renamed = names.iter().map(|name| renamed(name, by, megatron));
                renamed.collect::<Result<Option<Vec<_>>, MappingError>>()
            };
            let (Some(hf), Some(megatron)) =
                (of(&rule.hf, &repeat.hf, false)?, of(&rule.megatron, &repeat.megatron, true)?)
            else {
                continue;
            };
            self.holes(hf.iter().chain(&megatron), span)?;
            let made = hf.iter().chain(&megatron).map(|name| name.text().len()).sum::<usize>();
            let named = rule.name.len() + repeat.megatron[1].len();
            *text_left = text_left.checked_sub(made + 2 * named).ok_or_else(|| {
                self.error(span, "the names of repeated rules are too long together")
            })?;
            let again = |name: &String| format!("{name}, under {}", repeat.megatron[1]);
            all.push(Rule {
                line,
                name: again(&rule.name),
                hf,
                megatron,
                layers: Layers::All,
                instead: rule.instead.as_ref().map(again),
                ..rule.clone()
            });
        }
        if all.is_empty() {
            return Err(self.error(span, "no rule has names that begin like this"));
        }
        Ok(all)
    }

    /// A tensor that is one of a rule's, once more.
    pub(super) fn copied(
        &self,
        copy: &Spanned<CopyTable>,
        rules: &[Rule],
    ) -> Result<Copied, MappingError> {
        let (table, span) = (copy.get_ref(), copy.span());
        let hf = self.template(&table.hf, false)?;
        let of = rules.iter().find(|rule| rule.name == *table.of.get_ref());
        let of = of.ok_or_else(|| {
            let problem = format!("there is no rule {:?} to copy", table.of.get_ref());
            self.error(&table.of.span(), problem)
        })?;
        let counts = hf.holes().all(|hole| hole == Hole::Mtp) && hf.has(Hole::Mtp);
        match of.hf.as_slice() {
            [name] if name.is_plain() && counts && hf.lead.is_empty() => {
                Ok(Copied { hf, of: name.clone() })
            }
            _ => Err(self.error(&span, "a copy for each {mtp} is one of a tensor without numbers")),
        }
    }
}
