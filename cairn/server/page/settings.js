/** What the user has set, kept in this browser. */
import { recall, remember } from "./storage.js";

const NAME = "cairn.settings";
const byId = (id) => document.getElementById(id);

/** The settings dialog and its values. Reads `temperature`, `maxTokens`, `system`, `watch`. */
export class Settings {
  /** @param model as api.model() gives it: its defaults and limits show in the dialog */
  constructor(model) {
    this.temperature = model.chat ? 0.7 : 0;
    this.maxTokens = 256;
    this.system = "";
    this.watch = model.layers.length > 0;
    this.#restore();
    if (!model.layers.length) this.watch = false;
    byId("watch-row").hidden = !model.layers.length;
    byId("watch-limit").textContent = `up to ${model.maxSelection.toLocaleString()} tokens`;
    this.#bind(model);
  }

  #restore() {
    let kept = {};
    try {
      kept = JSON.parse(recall(localStorage, NAME) ?? "{}");
    } catch {
      // Someone else's text under our name: the defaults stay.
    }
    for (const name of ["temperature", "maxTokens", "system", "watch"]) {
      if (typeof kept[name] === typeof this[name]) this[name] = kept[name];
    }
  }

  #bind(model) {
    const dialog = byId("settings");
    const fields = [
      ["temperature", byId("temperature"), "valueAsNumber"],
      ["maxTokens", byId("max-tokens"), "valueAsNumber"],
      ["system", byId("system"), "value"],
      ["watch", byId("watch"), "checked"],
    ];
    if (Number.isFinite(model.maxModelLen)) byId("max-tokens").max = model.maxModelLen;
    for (const [name, field, property] of fields) {
      field[property] = this[name];
      field.addEventListener("input", () => {
        if (!field.checkValidity()) return;
        this[name] = field[property];
        const { temperature, maxTokens, system, watch } = this;
        remember(localStorage, NAME, JSON.stringify({ temperature, maxTokens, system, watch }));
      });
    }
    byId("settings-open").addEventListener("click", () => dialog.showModal());
  }
}
