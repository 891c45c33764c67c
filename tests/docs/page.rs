//! A parser of documentation pages for these tests: code blocks, inline code, prose and tables.

use std::path::Path;

pub struct Page {
    pub path: String,
    pub text: String,
}

/// A fenced block with its language.
pub struct Block {
    pub language: String,
    pub text: String,
}

impl Page {
    pub fn read(path: &str) -> Self {
        let full = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
        let text = std::fs::read_to_string(full).unwrap_or_else(|error| panic!("{path}: {error}"));
        Self { path: path.to_owned(), text }
    }

    /// Every page of prose: those in `docs` and its folders, and the ones beside the code.
    pub fn all() -> Vec<Self> {
        let mut paths = ["README.md", "CONTRIBUTING.md", "migrations/README.md"].map(str::to_owned).to_vec();
        let mut folders = vec!["docs".to_owned()];
        while let Some(folder) = folders.pop() {
            let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(&folder)).unwrap();
            for entry in entries.map(Result::unwrap) {
                let path = format!("{folder}/{}", entry.file_name().into_string().unwrap());
                if entry.path().is_dir() {
                    folders.push(path);
                } else if path.ends_with(".md") {
                    paths.push(path);
                }
            }
        }
        paths.sort();
        paths.iter().map(|path| Self::read(path)).collect()
    }

    /// The prose, and the blocks. A block of a list item loses the item's indentation.
    fn parts(&self) -> (String, Vec<Block>) {
        let (mut prose, mut blocks) = (String::new(), Vec::new());
        let mut open: Option<(usize, Block)> = None;
        for line in self.text.lines() {
            let indent = line.len() - line.trim_start().len();
            open = match (open, line.trim_start().strip_prefix("```")) {
                (None, Some(language)) => Some((indent, Block { language: language.to_owned(), text: String::new() })),
                (None, None) => {
                    prose.extend([line, "\n"]);
                    None
                }
                (Some((_, block)), Some(_)) => {
                    blocks.push(Block { text: block.text.trim_end().to_owned(), ..block });
                    None
                }
                (Some((indent, mut block)), None) => {
                    block.text.extend([line.get(indent..).unwrap_or_default(), "\n"]);
                    Some((indent, block))
                }
            };
        }
        assert!(open.is_none(), "{}: a block has no end", self.path);
        (prose, blocks)
    }

    pub fn blocks(&self) -> Vec<Block> {
        self.parts().1
    }

    pub fn blocks_of(&self, language: &str) -> Vec<String> {
        let blocks = self.blocks().into_iter().filter(|block| block.language == language);
        blocks.map(|block| block.text).collect()
    }

    /// Inline code outside blocks.
    pub fn spans(&self) -> Vec<String> {
        self.parts().0.split('`').skip(1).step_by(2).map(|span| span.replace('\n', " ")).collect()
    }

    /// Rows of the table whose header begins with this cell, below `heading`; cells without their surrounding blanks.
    pub fn table(&self, heading: &str, first: &str) -> Vec<Vec<String>> {
        let section = self.text.split(heading).nth(1).unwrap_or_else(|| panic!("{}: no `{heading}`", self.path));
        let mut lines = section.lines().skip_while(|line| !line.starts_with(&format!("| {first} |")));
        lines.next().unwrap_or_else(|| panic!("{}: no table of `{first}` below `{heading}`", self.path));
        let rows: Vec<Vec<String>> = lines
            .skip(1)
            .take_while(|line| line.starts_with('|'))
            .map(|line| line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect())
            .collect();
        assert!(!rows.is_empty(), "{}: the table of `{first}` is empty", self.path);
        rows
    }
}

/// A cell without its code marks.
pub fn plain(cell: &str) -> &str {
    cell.trim_matches('`')
}

#[test]
fn page_is_parsed() {
    let text = "# T\n\na `b\nc` d\n\n```sh\nls `x`\n```\n\n`e`\n\n- f\n\n  ```sh\n  g\n    h\n  ```\n\n## H\n\n\
                | k | v |\n|---|---|\n| `a` | 1 |\n\nend";
    let page = Page { path: "p".to_owned(), text: text.to_owned() };
    assert_eq!(page.blocks_of("sh"), ["ls `x`", "g\n  h"]);
    assert_eq!(page.spans(), ["b c", "e", "a"]);
    assert_eq!(page.table("## H", "k"), [["`a`", "1"]]);
}
