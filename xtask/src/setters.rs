//! Setters of public types, which STYLE.md names: read from `api/`, the text of all public names.

use std::collections::BTreeSet;

use xtask_host::workspace;

/// Types whose `with_` methods set what is shown under another name, each with the reason.
const SHOWN_OTHERWISE: &[(&str, &str)] = &[
    ("FormatError", "the standard library's `Error::source`"),
    ("StorageError", "`Error::source`; its message is part of `Display`"),
    ("ShardedTensor", "`with_local` sets dtype and data together"),
    ("ShardedTensorFactory", "`parts` shows all of them"),
];

/// What the text says of one crate.
#[derive(Default)]
struct Api<'a> {
    /// Type and name of each public field.
    fields: BTreeSet<(&'a str, &'a str)>,
    /// Type and name of each method that borrows.
    getters: BTreeSet<(&'a str, &'a str)>,
    /// Type and name of each method that takes `self` and a value, and returns `Self`.
    setters: BTreeSet<(&'a str, &'a str)>,
}

impl<'a> Api<'a> {
    fn parse(text: &'a str) -> Self {
        let mut api = Self::default();
        for line in text.lines() {
            let item = line.rsplit_once("] pub ").map_or(line, |(_, item)| item);
            let item = item.trim_start_matches("pub ").trim_start_matches("const ");
            let Some(function) = item.strip_prefix("fn ") else {
                if let Some((path, _)) = item.split_once(": ")
                    && let Some((type_, name)) = path.rsplit_once("::")
                {
                    api.fields.insert((last(type_), name));
                }
                continue;
            };
            let Some((path, rest)) = function.split_once('(') else { continue };
            // `Type<'_>::name<T>`, of which the parameters do not matter.
            let Some((type_, name)) = type_and_name(path) else { continue };
            if rest.starts_with("&self") {
                api.getters.insert((type_, name));
            } else if rest.starts_with("self, ") && returns_itself(rest) {
                api.setters.insert((type_, name));
            }
        }
        api
    }

    /// Whether the type shows the value that a setter sets: `with_rename` appends to `renames`.
    fn shows(&self, type_: &'a str, name: &str) -> bool {
        let plural = format!("{name}s");
        let has = |name: &str| {
            let named = |(other, field): &(&str, &str)| *other == type_ && *field == name;
            self.fields.iter().any(named) || self.getters.iter().any(named)
        };
        has(name) || has(&plural)
    }

    fn wrong(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        for (type_, name) in &self.setters {
            let is_exempt = SHOWN_OTHERWISE.iter().any(|(exempt, _)| exempt == type_);
            match name.strip_prefix("with_") {
                Some(shown) if !self.shows(type_, shown) && !is_exempt => {
                    wrong.push(format!("{type_}::{name}: nothing shows {shown}; call it {shown}"));
                }
                None if self.fields.contains(&(*type_, *name)) => {
                    wrong.push(format!("{type_}::{name}: a public field; call it with_{name}"));
                }
                _ => {}
            }
        }
        wrong
    }
}

/// Type and name of a method, from a path such as `module::Type<'_>::name<F>`.
fn type_and_name(path: &str) -> Option<(&str, &str)> {
    let (type_, name) = match path.split_once('<') {
        // The parameters of the type: the name of the method follows them.
        Some((type_, rest)) if rest.contains(">::") => (type_, rest.rsplit_once(">::")?.1),
        parameters => parameters.map_or(path, |(path, _)| path).rsplit_once("::")?,
    };
    Some((last(type_), name.split('<').next().unwrap_or(name)))
}

fn last(path: &str) -> &str {
    path.rsplit("::").next().unwrap_or(path)
}

fn returns_itself(signature: &str) -> bool {
    signature.contains(") -> Self") || signature.contains(") -> core::result::Result<Self,")
}

#[test]
fn setters_have_the_names_of_their_options() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for entry in std::fs::read_dir(workspace::root().join("api")).unwrap() {
        let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let api = Api::parse(&text);
        count += api.setters.len();
        wrong.extend(api.wrong());
    }
    assert!(count > 150, "{count} setters: the text of api/ is not understood");
    assert!(
        wrong.is_empty(),
        "STYLE.md, Options; api/ as of the last `cargo xtask api --update`:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn setters_are_understood() {
    let text = "pub c::m::A::x: u8\n\
        pub fn c::m::A::y(&self) -> u8\n\
        pub fn c::m::A::with_x(self, u8) -> Self\n\
        pub const fn c::m::A::with_y(self, u8) -> Self\n\
        pub fn c::m::A<'_>::z(self, impl core::convert::Into<u8>) -> Self\n\
        pub fn c::m::A::w<F>(self, F) -> Self where F: core::ops::function::Fn() -> u8\n\
        pub fn c::m::A::with_key(&self, u8) -> Self\n";
    let api = Api::parse(text);
    assert_eq!(api.setters.len(), 4, "{:?}", api.setters);
    assert!(api.wrong().is_empty(), "{:?}", api.wrong());
    let text = "pub c::A::x: u8\npub fn c::A::x(self, u8) -> Self\n\
        pub fn c::A::with_z(self, u8) -> core::result::Result<Self, c::E>\n";
    assert_eq!(Api::parse(text).wrong().len(), 2);
}
