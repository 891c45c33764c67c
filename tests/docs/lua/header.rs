//! A parser of the comment at the top of a library part: its sections, groups of packed fields, and codes.

use std::collections::BTreeMap;

/// Columns that the name of a group takes up.
const NAME_COLUMNS: usize = 12;

pub struct Header {
    pub text: String,
}

/// Fields that are packed together, in their order, with their bytes.
pub struct Group {
    pub name: String,
    pub fields: Vec<(String, usize)>,
}

impl Header {
    pub fn of(source: &str) -> Self {
        let lines: Vec<&str> = source.lines().map_while(|line| line.strip_prefix("--")).collect();
        Self { text: lines.join("\n") }
    }

    /// The section that begins with this word, up to the next one.
    pub fn part(&self, name: &str) -> String {
        // A section is indented by one blank, its content by more.
        let begins = |line: &str| line.starts_with(' ') && !line.starts_with("  ");
        let mut lines = self.text.lines().skip_while(|line| !line.starts_with(&format!(" {name}  ")));
        let first =
            lines.next().unwrap_or_else(|| panic!("no {name}")).trim_start().trim_start_matches(name).to_owned();
        std::iter::once(first)
            .chain(lines.take_while(|line| !begins(line)).map(str::to_owned))
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// The packed fields of a section; text after a semicolon is a remark.
    pub fn groups(&self, part: &str) -> Vec<Group> {
        let part = self.part(part);
        let mut groups: Vec<(String, String)> = Vec::new();
        for line in part.lines().skip(1).filter(|line| line.starts_with("   ")) {
            let line = &line[3..];
            let (name, text) = line.split_at(NAME_COLUMNS.min(line.len()));
            match groups.last_mut() {
                Some((_, before)) if name.trim().is_empty() => *before = format!("{before} {}", text.trim()),
                _ => groups.push((name.trim().to_owned(), text.trim().to_owned())),
            }
        }
        let field = |item: &str| {
            let (name, bytes) = item.trim().rsplit_once(' ')?;
            Some((name.to_owned(), bytes.parse().ok()?))
        };
        let group = |(name, text): (String, String)| {
            let fields: Option<Vec<_>> = text.split(';').next().unwrap().split(',').map(field).collect();
            fields.map(|fields| Group { name, fields })
        };
        groups.into_iter().filter_map(group).collect()
    }

    /// `what: 0 this, 1 that` in a section, as code by name.
    pub fn codes(&self, part: &str, what: &str) -> BTreeMap<String, u64> {
        let part = self.part(part);
        let list = part.split_once(&format!("{what}: ")).unwrap_or_else(|| panic!("no codes of {what}")).1;
        let items = list.lines().next().unwrap().split(',').map(|item| item.trim().split_once(' ').unwrap());
        items.map(|(code, name)| (name.to_owned(), code.parse().unwrap())).collect()
    }

    /// `name (1, 2, 3)` in a section.
    pub fn tuple(&self, part: &str, name: &str) -> Vec<u64> {
        let part = self.part(part);
        let inner = part.split_once(&format!("{name} (")).unwrap_or_else(|| panic!("no {name} (…)")).1;
        inner.split(')').next().unwrap().split(',').map(|number| number.trim().parse().unwrap()).collect()
    }

    /// `name 1` in a section.
    pub fn number(&self, part: &str, name: &str) -> u64 {
        let part = self.part(part);
        let rest = part.split_once(&format!("{name} ")).unwrap_or_else(|| panic!("no {name}")).1;
        rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
    }
}

impl Group {
    /// The format of Lua's `struct`: a field of eight bytes is text, all others are numbers.
    pub fn format(&self) -> String {
        let kind = |bytes: usize| if bytes == 8 { 'c' } else { 'I' };
        self.fields.iter().fold("<".to_owned(), |text, (_, bytes)| format!("{text}{}{bytes}", kind(*bytes)))
    }

    /// Reads its fields from the front.
    pub fn read(&self, bytes: &mut &[u8]) -> Vec<(String, u64)> {
        let number = |(name, width): &(String, usize)| {
            let (field, rest) = bytes.split_at_checked(*width).unwrap_or_else(|| panic!("the bytes end before {name}"));
            *bytes = rest;
            (name.clone(), field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
        };
        self.fields.iter().map(number).collect()
    }

    /// Packs a value for each of its fields, by name.
    pub fn write(&self, value_of: impl Fn(&str) -> u64) -> Vec<u8> {
        let field = |(name, width): &(String, usize)| value_of(name).to_le_bytes()[..*width].to_vec();
        self.fields.iter().flat_map(field).collect()
    }
}

#[test]
fn header_is_parsed() {
    let header = Header::of(
        "-- What.\n--\n-- KEYS  two:\n--   1  a\n-- ARGV  packed\n--   head        run id 8, number 6,\n\
         --               more 1; not read 9\n--   passed over want 2\n--   a, b        of a log\n--\n-- CODES  kind: 0 log, 1 window\n\
         --   mode: 2 none\n-- EXAMPLE  x\n--   want (1, 20) → remaining 99, run (0)\n\nlocal x = 1 -- KEYS",
    );
    assert_eq!(header.part("KEYS"), "  two:\n   1  a");
    let groups = header.groups("ARGV");
    let found: Vec<(&str, String)> = groups.iter().map(|group| (group.name.as_str(), group.format())).collect();
    assert_eq!(found, [("head", "<c8I6I1".to_owned()), ("passed over", "<I2".to_owned())]);
    assert_eq!(header.codes("CODES", "kind"), BTreeMap::from([("log".to_owned(), 0), ("window".to_owned(), 1)]));
    assert_eq!((header.tuple("EXAMPLE", "want"), header.number("EXAMPLE", "remaining")), (vec![1, 20], 99));
    let packed = groups[1].write(|name| if name == "want" { 258 } else { 0 });
    assert_eq!((&packed[..], groups[1].read(&mut &packed[..])), (&[2, 1][..], vec![("want".to_owned(), 258)]));
}
