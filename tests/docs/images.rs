//! Images of the pages: each has the form that its page states, and the README begins with the moving one.

use std::path::Path;

use crate::page::Page;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
const MOVING: &str = "docs/images/limit-change.gif";
/// The README of a forge loads slowly with more.
const MOVING_BYTES_MAX: usize = 1_000_000;
/// A moving picture of fewer images shows no change; one of a few images is a slide show.
const IMAGES_MIN: usize = 30;

fn read(path: &str) -> Vec<u8> {
    std::fs::read(Path::new(ROOT).join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What a GIF file states (<https://www.w3.org/Graphics/GIF/spec-gif89a.txt>).
#[derive(Debug, Default)]
struct Gif {
    size: (u16, u16),
    images: usize,
    /// Time of all images, in hundredths of a second.
    time: u32,
    repeats: bool,
}

/// Bytes that are read one after another.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(bytes);
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1)[0]
    }

    fn number(&mut self) -> u16 {
        u16::from_le_bytes(self.take(2).try_into().unwrap())
    }

    /// The data of blocks up to the empty one.
    fn blocks(&mut self) -> Vec<u8> {
        let mut data = Vec::new();
        loop {
            match self.byte() {
                0 => return data,
                length => data.extend(self.take(length.into())),
            }
        }
    }

    fn colours(&mut self, flags: u8) {
        if flags & 0x80 != 0 {
            self.take(3 << ((flags & 7) + 1));
        }
    }
}

impl Gif {
    fn of(file: &[u8]) -> Self {
        let mut reader = Reader(file);
        assert_eq!(reader.take(6), b"GIF89a");
        let mut gif = Self { size: (reader.number(), reader.number()), ..Self::default() };
        let flags = reader.byte();
        reader.take(2);
        reader.colours(flags);
        loop {
            match reader.byte() {
                0x2c => {
                    reader.take(8);
                    let flags = reader.byte();
                    reader.colours(flags);
                    reader.byte();
                    assert!(!reader.blocks().is_empty(), "image {} is empty", gif.images);
                    gif.images += 1;
                }
                0x21 => match (reader.byte(), reader.blocks()) {
                    (0xf9, control) => gif.time += u32::from(u16::from_le_bytes([control[1], control[2]])),
                    (0xff, application) => gif.repeats |= application.starts_with(b"NETSCAPE2.0\x01\0\0"),
                    _ => {}
                },
                0x3b => return gif,
                other => panic!("no GIF: a block begins with {other}"),
            }
        }
    }
}

#[test]
fn readme_begins_with_a_moving_picture() {
    let readme = Page::read("README.md").text;
    let before_first_section = readme.split("\n## ").next().unwrap();
    assert!(before_first_section.contains(&format!("]({MOVING})")), "no {MOVING} before the first section");
    let file = read(MOVING);
    assert!(file.len() < MOVING_BYTES_MAX, "{} bytes: see docs/images/make", file.len());
    let gif = Gif::of(&file);
    assert!(gif.repeats && gif.images >= IMAGES_MIN && gif.size.0 >= 900, "{gif:?}");
    assert!((500..=4_000).contains(&gif.time), "5 to 40 seconds: {gif:?}");
}

#[test]
fn every_image_is_shown_and_has_a_text() {
    let mut shown = Vec::new();
    for path in ["README.md", "docs/page.md", "docs/benchmarks.md"] {
        let text = Page::read(path).text;
        for line in text.lines().filter(|line| line.starts_with("![")) {
            let (words, file) = line.trim_start_matches("![").trim_end_matches(')').split_once("](").unwrap();
            assert!(words.len() > 20, "{path}: {line}: the text says what the image shows");
            shown.push(file.rsplit('/').next().unwrap().to_owned());
        }
    }
    for entry in std::fs::read_dir(Path::new(ROOT).join("docs/images")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let file = read(&format!("docs/images/{name}"));
        match name.rsplit_once('.').map(|(_, ending)| ending) {
            Some("png") => assert!(file.starts_with(b"\x89PNG\r\n\x1a\n"), "{name}"),
            Some("svg") => assert!(file.starts_with(b"<svg"), "{name}"),
            Some("gif") => assert!(file.starts_with(b"GIF89a"), "{name}"),
            _ => continue,
        }
        assert!(shown.contains(&name), "no page shows {name}");
    }
}
