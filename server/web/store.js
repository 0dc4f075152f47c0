// A text that the browser keeps. Where site data is blocked, it lasts as long as the page.

export class Kept {
  // `area` is "localStorage" or "sessionStorage": looking at them throws where they are blocked.
  constructor(area, name) {
    this.area = area;
    this.name = name;
    this.text = null;
    this.attempt((store) => {
      this.text = store.getItem(name);
    });
  }

  // Keeps a text, or none if it is null.
  set(text) {
    this.text = text;
    this.attempt((store) => (text === null ? store.removeItem(this.name) : store.setItem(this.name, text)));
  }

  attempt(use) {
    try {
      use(window[this.area]);
    } catch {
      // Blocked or full: `text` still has it.
    }
  }
}
